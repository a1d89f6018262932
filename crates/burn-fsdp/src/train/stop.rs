//! Why a rank stops, and how the others learn of it.

use burn::train::train::WorkerFailure;
use burn::train::{Interrupter, TrainingError};
use burn_fsdp_collectives::ProcessGroup;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Why a rank stops.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stop {
    /// The program said so, with or without a reason.
    Asked(Option<String>),
    /// An error of Burn's loop.
    Failed(String),
}

impl Stop {
    /// Returns why the interrupter of this process says to stop, if it does.
    pub(crate) fn of(interrupter: &Interrupter) -> Option<Self> {
        let why = || match interrupter.error() {
            Some(error) => Self::Failed(error.to_string()),
            None => Self::Asked(interrupter.get_message()),
        };
        interrupter.should_stop().then(why)
    }

    /// Says to the interrupter of another process that `rank` stops.
    pub(crate) fn tell(self, rank: usize, interrupter: &Interrupter) {
        match self {
            _ if interrupter.should_stop() => {}
            Self::Asked(reason) => interrupter.stop(reason.as_deref()),
            Self::Failed(message) => {
                let device_id = rank;
                let failure = WorkerFailure { device_id, message };
                interrupter.fail(TrainingError::Workers(vec![failure]));
            }
        }
    }
}

/// Tells all ranks something, and returns what each says, in the order of ranks.
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
