//! The reason why a rank stops, and its message to the others.

use burn::train::train::WorkerFailure;
use burn::train::{Interrupter, TrainingError};
use serde::{Deserialize, Serialize};

/// The reason why a rank stops.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stop {
    /// The program asked for it, with or without a reason.
    Asked(Option<String>),
    /// An error of Burn's loop.
    Failed(String),
}

impl Stop {
    /// Returns the stop that this process's interrupter requests, if any.
    pub(crate) fn of(interrupter: &Interrupter) -> Option<Self> {
        let why = || match interrupter.error() {
            Some(error) => Self::Failed(error.to_string()),
            None => Self::Asked(interrupter.get_message()),
        };
        interrupter.should_stop().then(why)
    }

    /// Returns the stop that ends the training of all ranks, if there is one: an error has priority over the program's
    /// request.
    pub(crate) fn first(stops: impl Iterator<Item = Option<Self>>) -> Option<(usize, Self)> {
        let stops = stops.enumerate();
        let stops: Vec<_> = stops
            .filter_map(|(rank, stop)| Some((rank, stop?)))
            .collect();
        let failed = stops
            .iter()
            .find(|(_, stop)| matches!(stop, Self::Failed(_)));
        failed.or(stops.first()).cloned()
    }

    /// Tells this process's interrupter that rank `rank` stops.
    pub(crate) fn tell(self, rank: usize, interrupter: &Interrupter) {
        match self {
            Self::Failed(message) if interrupter.error().is_none() => {
                let failure = WorkerFailure {
                    device_id: rank,
                    message: format!("on rank {rank}: {message}"),
                };
                interrupter.fail(TrainingError::Workers(vec![failure]));
            }
            Self::Asked(reason) if !interrupter.should_stop() => {
                interrupter.stop(reason.as_deref())
            }
            Self::Failed(_) | Self::Asked(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_outranks_a_requested_stop() {
        let asked = || Some(Stop::Asked(Some("enough".to_owned())));
        let failed = || Some(Stop::Failed("the disk is gone".to_owned()));
        assert_eq!(Stop::first([None, None].into_iter()), None);
        let first = Stop::first([None, asked(), asked()].into_iter());
        assert_eq!(first, asked().map(|stop| (1, stop)));
        let first = Stop::first([asked(), None, failed()].into_iter());
        assert_eq!(first, failed().map(|stop| (2, stop)));
        // A process that was asked to stop receives the error, and keeps its own reason.
        let interrupter = Interrupter::new();
        interrupter.stop(Some("enough"));
        failed().expect("above").tell(2, &interrupter);
        Stop::Failed("later".to_owned()).tell(1, &interrupter);
        let error = interrupter.error().expect("told").to_string();
        assert!(error.contains("on rank 2: the disk is gone"), "{error}");
    }
}
