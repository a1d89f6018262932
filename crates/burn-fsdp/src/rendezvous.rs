//! The meeting of the ranks of a training to save.

use burn_fsdp_checkpoint::{BoxError, Rendezvous};
use burn_fsdp_collectives::ProcessGroup;

/// The ranks of a save, meeting over a process group of their own.
///
/// For saves in the background, [`split`](ProcessGroup::split) the group off: its operations must not
/// mix with those of the training.
#[derive(Debug)]
pub struct GroupRendezvous(ProcessGroup);

impl GroupRendezvous {
    /// Meets over `group`.
    pub fn new(group: ProcessGroup) -> Self {
        Self(group)
    }
}

impl Rendezvous for GroupRendezvous {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.size()
    }

    fn gather(&mut self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        let all = self.0.exchange("checkpoint, gather", bytes)?;
        Ok((self.0.rank() == 0).then_some(all))
    }

    fn broadcast(&mut self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, BoxError> {
        let own = bytes.unwrap_or_default();
        let all = self.0.exchange("checkpoint, broadcast", own)?;
        all.into_iter()
            .next()
            .ok_or_else(|| "rank 0 gave nothing to broadcast".into())
    }
}
