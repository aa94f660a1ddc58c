//! `--ranks`: a list, or the rank that a cluster's scheduler gave this process.

use super::Talk;
use crate::error::{Error, Result};

/// Above any rank that options allow; a list is not made longer.
const LIMIT: u64 = 1 << 24;

/// Variables with the number of this process, the first one set counts, and how a run of `N` ranks is
/// asked for. Slurm sets `SLURM_PROCID` in jobs of an array too, where it is 0 in every one of them. The
/// third is what Kubernetes sets in the pods of an indexed Job.
const VARIABLES: [(&str, &str); 3] = [
    (ARRAY_TASK, "submit the array with sbatch --array=0-LAST"),
    (PROCESS, "start srun with --ntasks=COUNT"),
    ("JOB_COMPLETION_INDEX", "give the Job completions: COUNT"),
];
const ARRAY_TASK: &str = "SLURM_ARRAY_TASK_ID";
const PROCESS: &str = "SLURM_PROCID";

/// The ranks asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum Ranks {
    /// Sorted, each once.
    List(Vec<u64>),
    /// The one that the environment names.
    Environment,
}

/// `0-3,6`: ranks, sorted, each once; or `env`.
pub fn parse(text: &str) -> std::result::Result<Ranks, String> {
    if text == "env" {
        return Ok(Ranks::Environment);
    }
    let mut ranks = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |t: &str| t.trim().parse::<u64>().ok().filter(|n| *n < LIMIT);
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => ranks.extend(first..=last),
            _ => return Err(format!("{part:?}; expected ranks such as 0-3 or 0,2,5, or env")),
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    Ok(Ranks::List(ranks))
}

impl Ranks {
    /// The ranks; one that the environment names is below `world`, and a note says which variable it was.
    pub fn resolve(&self, world: u64, talk: Talk) -> Result<Vec<u64>> {
        match self {
            Ranks::List(ranks) => Ok(ranks.clone()),
            Ranks::Environment => {
                let (rank, variable) = from_environment(world, |name| std::env::var_os(name))?;
                talk.note(&format!("rank {rank} of {world}, read from {variable}"));
                Ok(vec![rank])
            }
        }
    }
}

/// The rank that the environment names, and the variable that does.
fn from_environment(
    world: u64,
    get: impl Fn(&str) -> Option<std::ffi::OsString>,
) -> Result<(u64, &'static str)> {
    let get = |name: &str| get(name).map(|value| value.to_string_lossy().into_owned());
    let found = VARIABLES.iter().find_map(|(name, how)| get(name).map(|value| (*name, *how, value)));
    let Some((name, how, value)) = found else {
        let names = VARIABLES.map(|(name, _)| name).join(", ");
        return Err(Error::request(
            "--ranks env",
            format!(
                "none of {names} is set: run under Slurm or as an indexed Job of Kubernetes, or give a list"
            ),
        ));
    };
    let Ok(rank) = value.parse::<u64>() else {
        return Err(Error::request(
            "--ranks env",
            format!("{name} is {value:?}, expected a whole number: {}", filled(how, world)),
        ));
    };
    if rank >= world {
        return Err(Error::request(
            "--ranks env",
            format!(
                "{name} is {rank}, but the last of {world} ranks is {}: {}",
                world.saturating_sub(1),
                filled(how, world)
            ),
        ));
    }
    if name == ARRAY_TASK
        && let Some(process) = get(PROCESS).filter(|p| p != "0")
    {
        return Err(Error::request(
            "--ranks env",
            format!(
                "{PROCESS} is {process:?} in a job of an array: all its processes would convert rank {rank}; start one process for each job of the array, or give a list"
            ),
        ));
    }
    Ok((rank, name))
}

/// A remedy with its numbers.
fn filled(how: &str, world: u64) -> String {
    how.replace("LAST", &world.saturating_sub(1).to_string()).replace("COUNT", &world.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_read_as_people_write_them() {
        assert_eq!(parse("0-3,6,2"), Ok(Ranks::List(vec![0, 1, 2, 3, 6])));
        assert_eq!(parse("env"), Ok(Ranks::Environment));
        for bad in ["", "3-1", "a", "1-", "-1", "ENV", "env,1", "0-99999999"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_first_variable_that_is_set_counts() {
        let read = |world, set: &[(&str, &str)]| {
            let set: Vec<_> = set.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
            from_environment(world, |name| set.iter().find(|(n, _)| n == name).map(|(_, v)| v.into()))
                .map_err(|e| e.to_string())
        };
        let (array, process, index) = ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX");
        assert_eq!(read(8, &[(process, "0"), (array, "7")]), Ok((7, array)));
        assert_eq!(read(8, &[(process, "5")]), Ok((5, process)));
        assert_eq!(read(8, &[(index, "1"), (process, "2")]), Ok((2, process)));
        assert_eq!(read(8, &[(index, "0")]), Ok((0, index)));
        for (set, words) in [
            (&[][..], &["none of", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX"][..]),
            (&[(array, "8")], &["SLURM_ARRAY_TASK_ID is 8", "the last of 8 ranks is 7", "--array=0-7"]),
            (&[(process, "9")], &["SLURM_PROCID is 9", "--ntasks=8"]),
            (&[(index, "8")], &["JOB_COMPLETION_INDEX is 8", "completions: 8"]),
            (&[(array, "")], &["is \"\"", "expected a whole number"]),
            (&[(process, "-1")], &["is \"-1\"", "expected a whole number"]),
            (&[(array, "1"), (process, "1")], &["would convert rank 1", "one process for each job"]),
            // A variable that is set wrongly does not make way for the next.
            (&[(array, "x"), (index, "1")], &["SLURM_ARRAY_TASK_ID is \"x\""]),
        ] {
            let error = read(8, set).unwrap_err();
            assert!(words.iter().all(|w| error.contains(w)), "{set:?}: {error}");
        }
    }
}
