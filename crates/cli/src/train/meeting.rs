//! The rendezvous through which the ranks save.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use burn_fsdp::checkpoint::{Rendezvous, ThreadRendezvous};

use crate::error::RankError;

/// The ends of the rendezvous for saves, one for each rank to take.
///
/// It is none of the process groups of the training, so that a disk may take longer than ranks wait for
/// each other in a step, and whatever goes wrong with a save stays there. It is no group isolated from
/// them either, as a failure of the training would end that one, too, and with it the save under way:
/// here a rank that fails still writes its part of the step before, which the next run goes on from.
#[derive(Debug)]
pub(crate) struct Meeting(Mutex<Vec<Option<ThreadRendezvous>>>);

impl Meeting {
    pub(crate) fn new(ranks: usize, deadline: Duration) -> Self {
        let ends = ThreadRendezvous::new(ranks, deadline).into_iter();
        Self(Mutex::new(ends.map(Some).collect()))
    }

    /// Takes the end of a rank, which can be done once.
    pub(crate) fn end_of(&self, rank: usize) -> Result<Box<dyn Rendezvous>, RankError> {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let end = ends.get_mut(rank).and_then(Option::take);
        Ok(Box::new(end.ok_or(RankError::Ended)?))
    }
}
