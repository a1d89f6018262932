//! The rendezvous through which the ranks save.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use burn_fsdp::ProcessGroup;
use burn_fsdp::checkpoint::{GroupRendezvous, Rendezvous, ThreadRendezvous};

use crate::error::RankError;
use crate::train::ranks::Ranks;

/// The way by which the ranks meet to save.
///
/// It is none of the process groups of the training, so that a disk may take longer than ranks wait for
/// each other in a step, and whatever goes wrong with a save stays there.
#[derive(Debug)]
pub(crate) enum Meeting {
    /// The ends of a rendezvous of threads, one for each rank to take. It is no group isolated from those of the
    /// training, as a failure of the training would end that one, too, and with it the save under way: here a
    /// rank that fails still writes its part of the step before, which the next run goes on from.
    Threads(Mutex<Vec<Option<ThreadRendezvous>>>),
    /// A group isolated from those of the training, with this deadline. Ranks that are processes have nothing
    /// else to meet by: a failure of the training ends the save under way, which leaves the step before.
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

    /// Takes the end of a rank of `world`, which can be done once. Collective where ranks are processes.
    pub(crate) fn end_of(&self, world: &ProcessGroup) -> Result<Box<dyn Rendezvous>, RankError> {
        match self {
            Self::Threads(ends) => {
                let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
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
