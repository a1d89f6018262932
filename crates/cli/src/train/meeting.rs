//! The rendezvous of the ranks for saves.

use std::time::Duration;

use burn_fsdp::ProcessGroup;
use burn_fsdp::internals::checkpoint::{GroupRendezvous, Rendezvous, ThreadRendezvous};
use parking_lot::Mutex;

use crate::error::RankError;
use crate::train::ranks::Ranks;

/// The rendezvous in which the ranks save.
///
/// This rendezvous is separate from the training's process groups. A disk may therefore take longer than ranks wait for
/// each other in a step, and a failed save does not affect the training.
#[derive(Debug)]
pub(crate) enum Meeting {
    /// One end of a thread rendezvous for each rank. A process group would also end, and with it the current save, if
    /// training failed. With this rendezvous, a failed rank still writes its part of the previous step, from which the
    /// next run resumes.
    Threads(Mutex<Vec<Option<ThreadRendezvous>>>),
    /// A group isolated from the training's groups, with this deadline. Processes have no other way to meet. If
    /// training fails, the current save ends, and the previous step remains.
    Processes(Duration),
}

impl Meeting {
    pub(crate) fn new(ranks: &Ranks, deadline: Duration) -> Self {
        if ranks.are_processes() {
            return Self::Processes(deadline);
        }
        let ends = ThreadRendezvous::new(ranks.number(), deadline).into_iter();
        Self::Threads(Mutex::new(ends.map(Some).collect()))
    }

    /// Takes this rank's end of the rendezvous, at most once per rank. Collective if ranks are processes.
    pub(crate) fn end_of(&self, world: &ProcessGroup) -> Result<Box<dyn Rendezvous>, RankError> {
        match self {
            Self::Threads(ends) => {
                let mut ends = ends.lock();
                let end = ends.get_mut(world.rank()).and_then(Option::take);
                Ok(Box::new(end.ok_or(RankError::Ended)?))
            }
            Self::Processes(deadline) => {
                let group = world.isolate("saves", *deadline)?;
                Ok(Box::new(GroupRendezvous::new(group)))
            }
        }
    }
}
