//! The engine of ranks that are processes, over MPI.
//!
//! One process is one rank. One thread owns MPI. It takes commands from the rank's threads through a channel, and polls
//! for arriving headers and completed transfers (`progress.rs`). All its MPI calls are non-blocking and point-to-point,
//! and use only the world's communicator. Groups are distinguished by the headers, so their number is not limited.
//! `src/README.md` of this crate describes the protocol.

mod addends;
mod engine;
mod header;
mod landing;
mod progress;
mod round;
mod wire;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use self::engine::MpiHandle;
use self::progress::{Command, Progress};
use self::wire::Wire;
use burn_fsdp_rendezvous::{Control, Messenger, News};
use burn_fsdp_transport::{BufferPool, Engine};

/// The place of this process in the MPI world, and the thread that owns MPI.
pub(crate) struct Connection {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    commands: Sender<Command>,
    /// Receives a message when the thread is done with MPI.
    done: Receiver<()>,
}

/// A messenger that sends news to other processes through MPI's thread.
#[derive(Debug)]
struct MpiMessenger(Sender<Command>);

impl Messenger for MpiMessenger {
    fn tell(&self, news: News) {
        // The thread is gone only when the world is over.
        let _ = self.0.send(Command::Tell(news));
    }
}

/// Initialises MPI on a separate thread. Call it once per process.
///
/// # Errors
///
/// The error of MPI, or of the system if it cannot start a thread.
pub(crate) fn connect() -> Result<Connection, String> {
    let (commands, received) = channel();
    let (place, placed) = channel();
    let (finish, done) = channel();
    let run = move || {
        let wire = match Wire::start() {
            Ok(wire) => wire,
            Err(error) => {
                let _ = place.send(Err(error.to_string()));
                return;
            }
        };
        let _ = place.send(Ok(wire.place()));
        Progress::new(wire, received).run();
        let _ = finish.send(());
    };
    let thread = thread::Builder::new().name("mpi".to_owned());
    thread.spawn(run).map_err(|error| error.to_string())?;
    let gone = |_| "the MPI thread ended during startup".to_owned();
    let (rank, size) = placed.recv().map_err(gone)??;
    Ok(Connection {
        rank,
        size,
        commands,
        done,
    })
}

impl Connection {
    /// Returns the messenger that sends news to the other processes.
    pub(crate) fn messenger(&self) -> Box<dyn Messenger> {
        Box::new(MpiMessenger(self.commands.clone()))
    }

    /// Returns this rank's handle to the group of all ranks.
    pub(crate) fn handle(&self, control: Arc<Control>, pool: BufferPool) -> Box<dyn Engine> {
        let members = (0..self.size).collect();
        let commands = self.commands.clone();
        Box::new(MpiHandle::new(control, members, self.rank, pool, commands))
    }

    /// Ends MPI. `with_others` is true if all ranks have ended without a failure: the processes then end MPI together.
    /// Gives up after `patience`.
    pub(crate) fn close(self, with_others: bool, patience: Duration) {
        let _ = self.commands.send(Command::Close { with_others });
        // The thread is done, or is stuck in MPI waiting for a process that is gone. Nothing more can be done here.
        let (Ok(()) | Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout)) =
            self.done.recv_timeout(patience);
    }
}
