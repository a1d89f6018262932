//! The ranks of a run: threads of this process, or processes started by a launcher such as `mpirun`.

use std::collections::BTreeMap;
use std::env;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use burn_fsdp::internals::collectives::{Fingerprint, LaunchError, Processes, processes};
use burn_fsdp::{DeviceName, LaunchConfig, ProcessGroup};

use crate::error::{InputError, RankError};
use crate::host;

/// Default number of ranks that are threads.
const THREADS: usize = 2;

/// The ranks of a run, and their location.
#[derive(Debug, Clone)]
pub(crate) enum Ranks {
    /// All ranks are threads of this process.
    Threads(usize),
    /// Each rank is a process, including this one.
    Processes(Processes),
}

impl Ranks {
    /// Finds the ranks. `given` is the number that the user specified, if any.
    pub(crate) fn find(given: Option<usize>) -> Result<Self, InputError> {
        Self::find_or(given, threads)
    }

    /// Finds the ranks. The default is `threads` threads of this process.
    pub(crate) fn find_or(
        given: Option<usize>,
        threads: impl FnOnce() -> usize,
    ) -> Result<Self, InputError> {
        let found = processes().map_err(Box::new)?;
        match (found, given) {
            (None, given) => Ok(Self::Threads(given.unwrap_or_else(threads))),
            (Some(found), Some(ranks)) if ranks != found.size => {
                Err(InputError::Launch(Box::new(LaunchError::OtherSize {
                    ranks,
                    processes: found.size,
                    launcher: found.launcher.to_owned(),
                })))
            }
            (Some(found), _) => Ok(Self::Processes(found)),
        }
    }

    /// Returns the number of ranks.
    pub(crate) fn number(&self) -> usize {
        match self {
            Self::Threads(number) => *number,
            Self::Processes(processes) => processes.size,
        }
    }

    /// Returns the number of compute threads of each rank. `given` is the number that the user specified, if any.
    pub(crate) fn threads_of_each(&self, given: Option<usize>) -> Result<usize, InputError> {
        if given == Some(0) {
            return Err(InputError::Zero { flag: "--threads" });
        }
        let config = LaunchConfig::new(self.number()).threads_per_rank(given.unwrap_or(0));
        Ok(config.num_threads(self.here()).map_err(Box::new)?)
    }

    /// Returns the number of ranks on this machine.
    pub(crate) fn here(&self) -> usize {
        match self {
            Self::Threads(number) => *number,
            Self::Processes(processes) => processes.here,
        }
    }

    /// Returns the number of ranks in this process.
    pub(crate) fn of_process(&self) -> usize {
        match self {
            Self::Threads(number) => *number,
            Self::Processes(_) => 1,
        }
    }

    /// Returns the number of processes of the run on this machine.
    pub(crate) fn processes_here(&self) -> usize {
        match self {
            Self::Threads(_) => 1,
            Self::Processes(processes) => processes.here,
        }
    }

    /// Finds the device of each rank of this process.
    pub(crate) fn devices(&self, name: &DeviceName) -> Result<Vec<Device>, InputError> {
        let here = match self {
            Self::Threads(number) => 0..*number,
            Self::Processes(processes) => processes.rank_here..processes.rank_here + 1,
        };
        let devices = here.map(|rank_here| name.device(rank_here));
        Ok(devices.collect::<Result<_, _>>()?)
    }

    /// Returns true if each rank is a process.
    pub(crate) fn are_processes(&self) -> bool {
        matches!(self, Self::Processes(_))
    }

    /// Returns true if rank 0 is in this process, which then writes the run's files and output.
    pub(crate) fn have_first(&self) -> bool {
        match self {
            Self::Threads(_) => true,
            Self::Processes(processes) => processes.rank == 0,
        }
    }
}

/// Returns the device of a rank, among those that [`Ranks::devices`] found in its process.
pub(crate) fn device_of(devices: &[Device], rank: usize) -> Device {
    match devices {
        [device] => device.clone(),
        devices => devices[rank].clone(),
    }
}

/// Returns the default number of ranks that are threads. It is one under a launcher that started one process.
fn threads() -> usize {
    let sizes = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];
    let is_one = |name| env::var(name).is_ok_and(|size| size == "1");
    if sizes.into_iter().any(is_one) {
        1
    } else {
        THREADS
    }
}

/// Returns the machine of each rank. Collective in the first call; later calls return the stored result.
pub(crate) fn hosts(world: &ProcessGroup) -> Result<&'static [String], RankError> {
    if let Some(known) = HOSTS.get() {
        return Ok(known);
    }
    let notes = world.exchange("hosts", host::name().into_bytes())?;
    let names = notes.iter().map(|note| String::from_utf8_lossy(note));
    let names = names.map(|name| name.into_owned()).collect();
    Ok(HOSTS.get_or_init(|| names))
}

/// Checks that all processes run the same program with the same arguments on the same data. Collective.
///
/// # Errors
///
/// [`RankError::Differs`] on every rank, with the difference, its rank and its machine.
pub(crate) fn agree(world: &ProcessGroup, data: String) -> Result<(), RankError> {
    let own = serde_json::to_vec(&identity(data)).unwrap_or_default();
    let notes = world.exchange("identity of the run", own)?;
    let hosts = hosts(world)?;
    let read = |note: &Vec<u8>| -> BTreeMap<String, String> {
        serde_json::from_slice(note).unwrap_or_default()
    };
    let Some(first) = notes.first().map(read) else {
        return Ok(());
    };
    for (rank, note) in notes.iter().enumerate().skip(1) {
        let other = read(note);
        let names = first.keys().chain(other.keys());
        let differs = |name: &&String| first.get(*name) != other.get(*name);
        if let Some(name) = names.into_iter().find(differs) {
            let value = |of: &BTreeMap<String, String>| match of.get(name) {
                Some(value) => value.clone(),
                None => "not given".to_owned(),
            };
            return Err(RankError::Differs {
                what: name.clone(),
                rank,
                host: hosts.get(rank).cloned().unwrap_or_default(),
                got: value(&other),
                expected: value(&first),
            });
        }
    }
    Ok(())
}

/// The machine of each rank, once a process has requested it.
static HOSTS: OnceLock<Vec<String>> = OnceLock::new();

/// Returns the machine of each rank as text, once [`hosts`] has collected them.
pub(crate) fn machines() -> Option<String> {
    HOSTS.get().map(|hosts| machines_of(hosts))
}

/// Waits briefly if this process is one of several, so the launcher can print the output of the others.
///
/// A launcher ends all processes as soon as one of them ends with an error. MPICH's launcher then loses the output of a
/// process that is still printing, and reports that process's death instead of the error.
pub(crate) fn let_launcher_hear() {
    if matches!(processes(), Ok(Some(_))) {
        thread::sleep(Duration::from_millis(300));
    }
}

/// Joins consecutive ranks on one machine: `ranks 0 to 3 on a, rank 4 on b`.
fn machines_of(hosts: &[String]) -> String {
    let mut parts = Vec::new();
    let mut first = 0;
    for chunk in hosts.chunk_by(|left, right| left == right) {
        let last = first + chunk.len() - 1;
        parts.push(match chunk.len() {
            1 => format!("rank {first} on {}", chunk[0]),
            _ => format!("ranks {first} to {last} on {}", chunk[0]),
        });
        first = last + 1;
    }
    parts.join(", ")
}

/// Returns the values that must be the same in all processes, by name.
fn identity(data: String) -> BTreeMap<String, String> {
    let mut identity = BTreeMap::new();
    let version = env!("CARGO_PKG_VERSION");
    let program = env::current_exe().and_then(std::fs::read);
    let program = match program {
        Ok(bytes) => {
            format!("version {version}, hash {:016x}", Fingerprint::of(&bytes))
        }
        Err(_) => format!("version {version}"),
    };
    identity.insert("the program".to_owned(), program);
    identity.insert("the data".to_owned(), data);
    let mut flag = "the command".to_owned();
    for argument in env::args_os().skip(1) {
        // Arguments may contain any bytes.
        let argument = argument.to_string_lossy().into_owned();
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value)),
            _ => (argument.as_str(), None),
        };
        if name.starts_with("--") {
            flag = name.to_owned();
            identity.insert(flag.clone(), value.unwrap_or("given").to_owned());
        } else {
            identity.insert(flag.clone(), argument);
        }
    }
    identity
}

#[cfg(test)]
mod tests {
    use super::machines_of;

    #[test]
    fn ranks_of_one_machine_are_named_together() {
        let hosts = ["a", "a", "a", "b", "a"].map(str::to_owned);
        assert_eq!(
            machines_of(&hosts),
            "ranks 0 to 2 on a, rank 3 on b, rank 4 on a"
        );
    }
}
