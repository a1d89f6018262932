//! Collects the ranks' results.

use burn_fsdp::ProcessGroup;

use crate::error::RankError;
use crate::host;
use crate::train::config::TrainConfig;
use crate::train::outcome::RankOutcome;

/// The channel through which results reach the process that reports.
pub(crate) enum Collector {
    /// Threads: the results are already in the reporting process.
    Threads,
    /// Processes: a group whose deadline allows for a save.
    Processes(ProcessGroup),
}

impl Collector {
    /// Creates the collector. Collective.
    pub(crate) fn new(config: &TrainConfig, world: &ProcessGroup) -> Result<Self, RankError> {
        if !config.ranks.are_processes() {
            return Ok(Self::Threads);
        }
        // Another rank may still be in its last save.
        let group = world.isolate("results", config.deadline + config.save_deadline())?;
        Ok(Self::Processes(group))
    }

    /// Returns the results to report in this process. If ranks are threads, these are the rank's own. If each rank is a
    /// process, rank 0 gets the results of all ranks, and the others get none. Collective.
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
