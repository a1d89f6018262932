//! The interface through which the ranks of a save communicate, with two implementations.

use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::error::BoxError;

/// A rank's connection to the other ranks of a save.
///
/// A save makes the same calls in the same order on every rank: `broadcast`, `gather`, `broadcast`. It makes only the
/// first if rank 0 cannot begin the save. For background saves, implement it over a *separate* process group, because
/// the calls must not mix with the collectives of the training. A call must return an error when a peer does not
/// arrive.
pub trait Rendezvous: Send {
    /// Returns this rank's number, starting at 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks that save together.
    fn world_size(&self) -> usize;

    /// Sends every rank's bytes to rank 0, which gets them in rank order. Returns `None` on the other ranks.
    ///
    /// # Errors
    ///
    /// If a peer failed or did not arrive in time.
    fn gather(&mut self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, BoxError>;

    /// Sends the bytes of rank 0 to every rank. Only rank 0 passes bytes.
    ///
    /// # Errors
    ///
    /// If a peer failed or did not arrive in time.
    fn broadcast(&mut self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, BoxError>;
}

/// The rendezvous of a single rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Rendezvous for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn gather(&mut self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        Ok(Some(vec![bytes]))
    }

    fn broadcast(&mut self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, BoxError> {
        bytes.ok_or_else(|| "rank 0 provided nothing to broadcast".into())
    }
}

/// The rendezvous of ranks that are threads of this process.
///
/// After one failed call all later calls fail. Otherwise a late message of a failed save could be mistaken for a
/// message of the next.
pub struct ThreadRendezvous {
    rank: usize,
    world_size: usize,
    deadline: Duration,
    ends: Ends,
    failure: Option<String>,
}

enum Ends {
    /// Rank 0, with a wire to every other rank, in rank order.
    Root(Vec<Wire>),
    /// Another rank, with a wire to rank 0.
    Leaf(Wire),
}

/// A connection to one other rank, in both directions.
struct Wire {
    to: Sender<Vec<u8>>,
    from: Receiver<Vec<u8>>,
}

impl ThreadRendezvous {
    /// Creates the handles of `world_size` ranks, in rank order. A call fails if a peer does not arrive within
    /// `deadline`, which must leave the slowest rank enough time to write its file, and at once if a peer's handle is
    /// dropped.
    pub fn new(world_size: usize, deadline: Duration) -> Vec<Self> {
        let end = |rank, ends| Self {
            rank,
            world_size,
            deadline,
            ends,
            failure: None,
        };
        let mut root = Vec::new();
        let mut leaves = Vec::new();
        for rank in 1..world_size {
            let (to_leaf, from_root) = channel();
            let (to_root, from_leaf) = channel();
            root.push(Wire {
                to: to_leaf,
                from: from_leaf,
            });
            leaves.push(end(
                rank,
                Ends::Leaf(Wire {
                    to: to_root,
                    from: from_root,
                }),
            ));
        }
        let mut all = Vec::with_capacity(world_size);
        if world_size > 0 {
            all.push(end(0, Ends::Root(root)));
        }
        all.extend(leaves);
        all
    }

    fn guarded<T>(
        &mut self,
        call: impl FnOnce(&mut Ends, Instant) -> Result<T, String>,
    ) -> Result<T, BoxError> {
        if let Some(failure) = &self.failure {
            let again = format!("an earlier call failed ({failure}); create a new rendezvous");
            return Err(again.into());
        }
        // A longer deadline could overflow the clock.
        const LONGEST: Duration = Duration::from_secs(1 << 31);
        let until = Instant::now() + self.deadline.min(LONGEST);
        call(&mut self.ends, until).map_err(|problem| {
            let problem = if problem.ends_with("in time") {
                format!("{problem} ({:?})", self.deadline)
            } else {
                problem
            };
            self.failure = Some(problem.clone());
            problem.into()
        })
    }
}

impl Rendezvous for ThreadRendezvous {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn gather(&mut self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        self.guarded(|ends, until| match ends {
            Ends::Root(leaves) => {
                let mut all = vec![bytes];
                for (index, leaf) in leaves.iter().enumerate() {
                    all.push(receive(&leaf.from, index + 1, until)?);
                }
                Ok(Some(all))
            }
            Ends::Leaf(root) => {
                send(&root.to, 0, bytes)?;
                Ok(None)
            }
        })
    }

    fn broadcast(&mut self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, BoxError> {
        self.guarded(|ends, until| match ends {
            Ends::Root(leaves) => {
                let bytes = bytes.ok_or("rank 0 provided nothing to broadcast")?;
                // Every remaining rank receives it, even if another rank is gone.
                let mut sent = Ok(());
                for (index, leaf) in leaves.iter().enumerate() {
                    sent = sent.and(send(&leaf.to, index + 1, bytes.clone()));
                }
                sent.map(|()| bytes)
            }
            Ends::Leaf(root) => receive(&root.from, 0, until),
        })
    }
}

impl fmt::Debug for ThreadRendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadRendezvous")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}

fn send(to: &Sender<Vec<u8>>, rank: usize, bytes: Vec<u8>) -> Result<(), String> {
    to.send(bytes).map_err(|_| format!("rank {rank} has left"))
}

fn receive(from: &Receiver<Vec<u8>>, rank: usize, until: Instant) -> Result<Vec<u8>, String> {
    let left = until.saturating_duration_since(Instant::now());
    from.recv_timeout(left).map_err(|error| match error {
        RecvTimeoutError::Timeout => format!("rank {rank} did not arrive in time"),
        RecvTimeoutError::Disconnected => format!("rank {rank} has left"),
    })
}
