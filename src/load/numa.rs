//! Cores near a GPU.

#[cfg(feature = "cuda")]
use rustix::thread::sched_setaffinity;
use rustix::thread::{CpuSet, sched_getaffinity};

/// The cores this thread may run on; with a NUMA node, those of them that belong to it. All that
/// are allowed when the node is unknown or none of its cores is allowed.
pub fn cores(node: Option<usize>) -> Vec<usize> {
    let allowed: Vec<usize> = match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&c| set.is_set(c)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    };
    let near = node
        .and_then(|n| std::fs::read_to_string(format!("/sys/devices/system/node/node{n}/cpulist")).ok())
        .map(|list| parse_list(&list))
        .unwrap_or_default();
    let both: Vec<usize> = allowed.iter().copied().filter(|c| near.contains(c)).collect();
    if both.is_empty() { allowed } else { both }
}

/// Keeps this thread on `cores`. Memory it touches first then lies on their node. A refusal is no
/// error: the load is only slower.
#[cfg(feature = "cuda")]
pub fn bind(cores: &[usize]) {
    let mut set = CpuSet::new();
    for &core in cores.iter().filter(|&&c| c < CpuSet::MAX_CPU) {
        set.set(core);
    }
    let _ = sched_setaffinity(None, &set);
}

/// A kernel list such as `0-15,32-47`.
fn parse_list(text: &str) -> Vec<usize> {
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some((first.parse().ok()?, last.parse().ok()?))
        })
        .filter(|&(_, last): &(usize, usize)| last < CpuSet::MAX_CPU)
        .flat_map(|(first, last)| first..=last)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_lists() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list("\n"), [0; 0]);
        assert_eq!(parse_list("0-99999999999,5"), [5]);
    }

    #[test]
    fn some_core_is_always_left() {
        assert!(!cores(None).is_empty());
        assert!(!cores(Some(9999)).is_empty());
    }
}
