//! The connection between `launch` and the processes below it. When `launch` is gone, for whatever reason, the
//! processes of this program that it has started are notified, at any depth.
//!
//! `launch` holds the only writing end of a pipe, and its descendants inherit the reading end. End of file means that
//! `launch` is gone. A process in between may close the pipe, as `mpirun` does.
//! A process on the same machine then checks regularly whether `launch` is still in the list of processes.

use std::fs::{self, File};
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;
use std::{env, process};

use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};

use crate::console;
use crate::process::{Process, machine};

/// The variable that tells a process which `launch` started it.
const VARIABLE: &str = "BURN_FSDP_LAUNCHED_BY";

/// The time between two checks that `launch` is alive, if there is no pipe.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Maximum wait until the message is printed.
const PRINT_AT_MOST: Duration = Duration::from_secs(1);

/// The exit code of a process that SIGTERM ends. When `launch` is gone, a process with nothing to save also exits with
/// it.
const TOLD_TO_END: i32 = 143;

/// The value of [`VARIABLE`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Tie {
    /// The machine of `launch`, see [`machine`].
    machine: Option<String>,
    /// The process id of `launch`.
    process: u32,
    /// The start time of `launch`.
    started: Option<u64>,
    /// The file descriptor of the pipe's reading end.
    end: i32,
    /// The inode number of the pipe, which distinguishes it from another file opened under the same descriptor.
    pipe: u64,
}

/// One end of the connection, held by `launch`. The processes that `launch` starts are tied to it while this value
/// lives.
#[derive(Debug)]
pub(crate) struct Tether {
    tie: Tie,
    _reader: PipeReader,
    _writer: PipeWriter,
}

impl Tether {
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        // Child processes inherit this end, but not the writing end.
        fcntl_setfd(&reader, FdFlags::empty())?;
        let end = reader.as_raw_fd();
        let process = process::id();
        let tie = Tie {
            machine: machine(),
            process,
            started: Process::find(process).map(|own| own.started),
            end,
            pipe: fs::metadata(path_of(end))?.ino(),
        };
        Ok(Self {
            tie,
            _reader: reader,
            _writer: writer,
        })
    }

    /// Returns the environment variable that ties a child process, as name and value.
    pub(crate) fn variable(&self) -> (&'static str, String) {
        let text = serde_json::to_string(&self.tie).unwrap_or_default();
        (VARIABLE, text)
    }
}

/// How a process is notified of the end of `launch`.
#[derive(Debug)]
enum Way {
    Pipe(File),
    Looks(Process),
    /// `launch` is already gone.
    Gone,
}

impl Tie {
    /// Finds out how this process is notified when `launch` is gone. Returns `None` if it cannot be: a process in
    /// between has closed the pipe, and `launch` is on another machine.
    fn way(&self) -> Option<Way> {
        let path = path_of(self.end);
        let is_pipe = |file: &fs::Metadata| file.file_type().is_fifo() && file.ino() == self.pipe;
        if fs::metadata(&path).is_ok_and(|file| is_pipe(&file))
            && let Ok(pipe) = File::open(&path)
        {
            return Some(Way::Pipe(pipe));
        }
        let started = self.started?;
        if machine()? != *self.machine.as_ref()? {
            return None;
        }
        let found = Process::find(self.process).filter(|process| process.started == started);
        Some(found.map_or(Way::Gone, Way::Looks))
    }
}

impl Way {
    /// Returns when `launch` is gone.
    fn wait(self) {
        match self {
            Self::Pipe(mut pipe) => loop {
                match pipe.read(&mut [0; 64]) {
                    Ok(0) => return,
                    // Nobody writes to the pipe. Wait again after an unexpected read.
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => thread::sleep(LOOK_EVERY),
                }
            },
            Self::Looks(process) => {
                while process.is_alive() {
                    thread::sleep(LOOK_EVERY);
                }
            }
            Self::Gone => {}
        }
    }
}

/// The flag to set at the end of `launch`, and whether this process prints the message.
static STOP: OnceLock<(Arc<AtomicBool>, bool)> = OnceLock::new();

/// True once this process is tied to a `launch`.
static IS_TIED: AtomicBool = AtomicBool::new(false);

/// Watches the `launch` that has started this process, if there is one, in a thread. When it is gone, the process ends,
/// unless [`tell`] was called.
pub(crate) fn watch() {
    let tie = env::var(VARIABLE).ok();
    let tie = tie.and_then(|text| serde_json::from_str::<Tie>(&text).ok());
    let Some(way) = tie.and_then(|tie| tie.way()) else {
        return;
    };
    IS_TIED.store(true, Ordering::Relaxed);
    let wait = move || {
        way.wait();
        end();
    };
    // Without the thread, the process behaves as without `launch`.
    let _ = thread::Builder::new().name("tether".to_owned()).spawn(wait);
}

/// Makes the end of `launch` set `stop` instead of ending this process, with a message if `says_so`. Call it once per
/// process.
pub(crate) fn tell(stop: Arc<AtomicBool>, says_so: bool) {
    let _ = STOP.set((stop, says_so));
}

/// Returns true if this process runs below a `launch`, which passes signals on to it, and whose end it notices.
pub(crate) fn is_tied() -> bool {
    IS_TIED.load(Ordering::Relaxed)
}

fn end() {
    match STOP.get() {
        Some((stop, says_so)) => {
            // Print first: once the flag is set, the process may end at any time.
            if *says_so {
                tell_within(
                    PRINT_AT_MOST,
                    "warning: `burn-fsdp launch` has ended; this process now stops in an orderly way",
                );
            }
            stop.store(true, Ordering::Relaxed);
        }
        None => {
            console::tell("error: `burn-fsdp launch`, which started this process, has ended");
            process::exit(TOLD_TO_END);
        }
    }
}

/// Prints a message, and waits no longer than `limit`. Printing blocks if the reader of the output is gone as well.
fn tell_within(limit: Duration, message: &'static str) {
    let (printed, is_printed) = mpsc::channel();
    let print = move || {
        console::tell(message);
        let _ = printed.send(());
    };
    // Without the thread, its end of the channel is dropped, and the wait is over.
    let _ = thread::Builder::new().spawn(print);
    let _ = is_printed.recv_timeout(limit);
}

/// Returns the path under which this process can reopen one of its open files.
fn path_of(end: i32) -> String {
    format!("/dev/fd/{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tether_ends_with_its_writer() {
        let tether = Tether::new().expect("a pipe");
        let way = tether.tie.way().expect("a way");
        assert!(matches!(way, Way::Pipe(_)), "{way:?}");
        drop(tether);
        way.wait();
    }

    #[test]
    fn a_reused_descriptor_is_not_the_pipe() {
        let tether = Tether::new().expect("a pipe");
        let other = Tether::new().expect("a pipe");
        let mut tie = tether.tie;
        // A child process may use this descriptor for another file.
        tie.end = other.tie.end;
        if tie.started.is_some() {
            let way = tie.way().expect("this process is in the list");
            assert!(matches!(way, Way::Looks(_)), "{way:?}");
        }
        tie.end = -1;
        tie.machine = Some("another machine".to_owned());
        assert!(tie.way().is_none());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_already_ended_launch_is_detected() {
        let tether = Tether::new().expect("a pipe");
        let mut tie = tether.tie;
        tie.end = -1;
        tie.started = tie.started.map(|started| started + 1);
        let way = tie.way().expect("a way");
        assert!(matches!(way, Way::Gone), "{way:?}");
        way.wait();
    }
}
