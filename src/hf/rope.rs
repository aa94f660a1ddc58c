//! Rope scaling that a GGUF keeps only as a tensor.

use crate::error::{Error, Result};

/// Llama 3's rope scaling (`rope_type: llama3`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Llama3 {
    /// By how much long wavelengths are stretched.
    pub factor: f64,
    /// `original / low_freq` is the wavelength from which everything is stretched.
    pub low_freq: f64,
    /// `original / high_freq` is the wavelength up to which nothing is.
    pub high_freq: f64,
    /// Context length of the pre-training.
    pub original: f64,
}

impl Llama3 {
    /// What `rope_freqs.weight` holds for this scaling: per frequency, the divisor llama.cpp applies.
    /// The formula is that of `_compute_llama3_parameters` in transformers, inverted as llama.cpp's
    /// converter does.
    fn divisors(&self, theta: f64, count: usize) -> Vec<f64> {
        (0..count)
            .map(|i| {
                let wavelength = wavelength(theta, i, count);
                if wavelength < self.original / self.high_freq {
                    1.0
                } else if wavelength > self.original / self.low_freq {
                    self.factor
                } else {
                    let smooth =
                        (self.original / wavelength - self.low_freq) / (self.high_freq - self.low_freq);
                    1.0 / ((1.0 - smooth) / self.factor + smooth)
                }
            })
            .collect()
    }

    fn gives(&self, divisors: &[f64], theta: f64) -> bool {
        // The tensor was computed in f32: 1e-4 is far above its rounding, far below a wrong parameter.
        self.divisors(theta, divisors.len())
            .iter()
            .zip(divisors)
            .all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs())
    }
}

fn wavelength(theta: f64, i: usize, count: usize) -> f64 {
    2.0 * std::f64::consts::PI * theta.powf(i as f64 / count as f64)
}

/// The scaling whose divisors `rope_freqs.weight` holds; `None` when it scales nothing.
///
/// Only the ratios of original length, low and high factor show in the divisors, so `low_freq` is
/// taken as 1 (as in every published model). The usual values are tried first: they are the
/// model's own whenever they give the same tensor. Then the line that the blended frequencies lie
/// on is fitted.
pub(super) fn llama3(divisors: &[f64], theta: f64) -> Result<Option<Llama3>> {
    let refused = |why: &str| {
        Err(Error::source(
            "rope_freqs.weight",
            format!("{why}: no Llama 3 rope scaling; give the model's own config.json with --hf-config DIR"),
        ))
    };
    if divisors.is_empty() || divisors.iter().any(|d| !d.is_finite() || *d < 1.0 - 1e-6) {
        return refused("divisors below 1, not finite, or none");
    }
    let factor = divisors.iter().fold(1.0, |a: f64, b| a.max(*b));
    if factor <= 1.0 + 1e-6 {
        return Ok(None);
    }
    let factor = rounded(factor);
    for high_freq in [4.0, 2.0, 8.0, 3.0, 16.0, 32.0] {
        for original in std::iter::once(8192.0).chain((7..=22).map(|n| f64::from(1u32 << n))) {
            let usual = Llama3 { factor, low_freq: 1.0, high_freq, original };
            if usual.gives(divisors, theta) {
                return Ok(Some(usual));
            }
        }
    }
    // Between the two ends, smooth = slope / wavelength - offset, with slope = original / (high - low)
    // and offset = low / (high - low); smooth follows from the divisor.
    let points: Vec<(f64, f64)> = divisors
        .iter()
        .enumerate()
        .filter(|(_, d)| **d > 1.0 + 1e-5 && **d < factor * (1.0 - 1e-5))
        .map(|(i, d)| {
            (1.0 / wavelength(theta, i, divisors.len()), (1.0 / d - 1.0 / factor) / (1.0 - 1.0 / factor))
        })
        .collect();
    let n = points.len() as f64;
    let mean = |f: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (mx, my) = (mean(&|p| p.0), mean(&|p| p.1));
    let slope = mean(&|p| (p.0 - mx) * (p.1 - my)) / mean(&|p| (p.0 - mx).powi(2));
    let offset = slope * mx - my;
    let high_freq = 1.0 + 1.0 / offset;
    let fitted = Llama3 { factor, low_freq: 1.0, high_freq, original: slope * (high_freq - 1.0) };
    let rounded = Llama3 { high_freq: rounded(high_freq), original: fitted.original.round(), ..fitted };
    for candidate in [rounded, fitted] {
        if candidate.original.is_finite() && candidate.high_freq > 1.0 && candidate.gives(divisors, theta) {
            return Ok(Some(candidate));
        }
    }
    refused("divisors that no factor explains")
}

/// To 5 significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recovered(scaling: Llama3, theta: f64, count: usize) -> Llama3 {
        // As in the file: f32.
        let divisors: Vec<f64> =
            scaling.divisors(theta, count).iter().map(|d| f64::from(*d as f32)).collect();
        llama3(&divisors, theta).unwrap().unwrap()
    }

    #[test]
    fn published_scalings_are_recovered() {
        // config.json of Llama 3.1 8B and Llama 3.2 1B.
        for (factor, count) in [(8.0, 64), (32.0, 32)] {
            let llama = Llama3 { factor, low_freq: 1.0, high_freq: 4.0, original: 8192.0 };
            assert_eq!(recovered(llama, 500_000.0, count), llama);
        }
    }

    #[test]
    fn odd_scalings_give_the_same_divisors() {
        let odd = Llama3 { factor: 12.5, low_freq: 1.0, high_freq: 5.5, original: 10_000.0 };
        assert_eq!(recovered(odd, 500_000.0, 64), odd);
        let low = Llama3 { factor: 8.0, low_freq: 2.0, high_freq: 8.0, original: 16384.0 };
        let found = recovered(low, 500_000.0, 64);
        assert_eq!(found, Llama3 { low_freq: 1.0, high_freq: 4.0, original: 8192.0, ..low });
    }

    #[test]
    fn other_tensors_are_refused() {
        assert_eq!(llama3(&[1.0; 32], 10_000.0).unwrap(), None);
        for bad in
            [vec![], vec![0.5; 8], vec![f64::NAN; 8], vec![8.0, 1.0, 8.0, 1.0], vec![1.0, 2.0, 3.0, 9.0]]
        {
            assert!(llama3(&bad, 10_000.0).is_err(), "{bad:?}");
        }
    }
}
