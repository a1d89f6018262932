//! Notes: messages between ranks.

use burn_fsdp_collectives::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use burn_fsdp_glue::error::Error;

/// Sends a message to all ranks, and returns each rank's message, in rank order.
///
/// Collective.
pub(crate) fn exchanged<T: Serialize + DeserializeOwned>(
    world: &ProcessGroup,
    label: &'static str,
    own: &T,
) -> Result<Vec<T>, Error> {
    let bytes = serde_json::to_vec(own).expect("numbers and texts can be written");
    let all = world.exchange(label, bytes)?;
    let read = |(rank, bytes): (usize, &Vec<u8>)| {
        let said = serde_json::from_slice(bytes);
        said.map_err(|_| Error::OtherTraining { what: label, rank })
    };
    all.iter().enumerate().map(read).collect()
}
