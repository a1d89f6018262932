//! The collection of the ranks' results.

use burn_fsdp::ProcessGroup;

use crate::error::RankError;
use crate::host;
use crate::train::config::TrainConfig;
use crate::train::outcome::RankOutcome;

/// The way of the ranks' results to the process that reports.
pub(crate) enum Collector {
    /// Results of threads are in that process already.
    Threads,
    /// A group that waits as long as a save may take.
    Processes(ProcessGroup),
}

impl Collector {
    /// Makes the way. Collective.
    pub(crate) fn new(config: &TrainConfig, world: &ProcessGroup) -> Result<Self, RankError> {
        if !config.ranks.are_processes() {
            return Ok(Self::Threads);
        }
        // The last save of another rank may take so long.
        let group = world.isolate("results", config.deadline + config.save_deadline())?;
        Ok(Self::Processes(group))
    }

    /// Returns the results that this rank is to hand on: its own, or, if each rank is a process, those of all on
    /// rank 0 and none on the others. Collective.
    pub(crate) fn collect(&self, own: RankOutcome) -> Result<Vec<RankOutcome>, RankError> {
        let Self::Processes(group) = self else {
            return Ok(vec![own]);
        };
        let own = RankOutcome {
            peak_rss_bytes: host::peak_rss_bytes(),
            ..own
        };
        let mut bytes = Vec::new();
        ciborium::into_writer(&own, &mut bytes).map_err(|error| RankError::Result {
            problem: error.to_string(),
        })?;
        let notes = group.exchange("results", bytes)?;
        if group.rank() > 0 {
            return Ok(Vec::new());
        }
        let outcomes = notes.iter().map(|note| {
            ciborium::from_reader(note.as_slice()).map_err(|error| RankError::Result {
                problem: error.to_string(),
            })
        });
        outcomes.collect()
    }
}
