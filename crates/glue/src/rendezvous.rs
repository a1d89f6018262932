//! Communication between the ranks of a training run, to save and to exchange information.

use burn_fsdp_checkpoint::{BoxError, Rendezvous};
use burn_fsdp_collectives::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::CheckpointError;

/// A rendezvous of the ranks of a save, over a process group.
///
/// For background saves, create the group with [`split`](ProcessGroup::split): its operations must not mix with the
/// training's.
#[derive(Debug)]
pub struct GroupRendezvous(ProcessGroup);

impl GroupRendezvous {
    /// Creates a rendezvous over `group`.
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
            .ok_or_else(|| "rank 0 provided nothing to broadcast".into())
    }
}

/// Sends a message to all ranks of `group`, and returns each rank's message, in rank order. Collective.
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    label: &'static str,
    own: &T,
) -> Result<Vec<T>, CheckpointError> {
    let lost = |error: serde_json::Error| CheckpointError::Peer {
        rank: group.rank(),
        reason: error.to_string(),
    };
    let words = group.exchange(label, serde_json::to_vec(own).map_err(lost)?)?;
    let words = words.iter().map(|word| serde_json::from_slice(word));
    words.collect::<Result<_, _>>().map_err(lost)
}
