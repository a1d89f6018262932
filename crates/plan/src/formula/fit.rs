//! The search for changes that make a job fit.

use serde::Serialize;

use super::job::{Checkpointing, Job};
use burn_fsdp_spmd::Strategy;

/// A change, or a combination of changes, that makes a job fit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Advice {
    /// A description of the change.
    pub change: String,
    /// The job after the change.
    pub job: Job,
    /// Peak memory of the changed job in bytes.
    pub peak: u64,
}

/// Maximum number of ranks in the search.
const MAX_RANKS: usize = 1 << 20;

/// Finds changes that reduce a job's peak to at most `available` bytes: all single changes that suffice, or
/// combinations if none does. Returns no advice if nothing suffices. `peak` returns a job's peak in bytes, or `None` if
/// the engine does not support the job.
pub fn advise(job: &Job, available: u64, peak: &dyn Fn(&Job) -> Option<u64>) -> Vec<Advice> {
    let search = Search { available, peak };
    let alone: Vec<_> = Change::ALL
        .iter()
        .filter_map(|change| search.with(job, *change))
        .collect();
    if !alone.is_empty() {
        return alone;
    }
    let cheap = [Change::Divide, Change::Full, Change::Batch, Change::Demand];
    let mut found: Vec<Advice> = Vec::new();
    for last in [Change::Ranks, Change::Offload] {
        let changes: Vec<_> = cheap.into_iter().chain([last]).collect();
        let advice = search.together(job, &changes);
        found.extend(advice.filter(|advice| !found.contains(advice)));
    }
    if found.is_empty() {
        let changes: Vec<_> = cheap
            .into_iter()
            .chain([Change::Offload, Change::Ranks])
            .collect();
        found.extend(search.together(job, &changes));
    }
    found
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// Use full sharding.
    Divide,
    Selective,
    Full,
    Batch,
    /// Turn off prefetching, so units are gathered when they are needed.
    Demand,
    Offload,
    Ranks,
}

impl Change {
    /// All changes, the cheapest first.
    const ALL: [Self; 7] = [
        Self::Divide,
        Self::Selective,
        Self::Full,
        Self::Batch,
        Self::Demand,
        Self::Offload,
        Self::Ranks,
    ];
}

struct Search<'a> {
    available: u64,
    peak: &'a dyn Fn(&Job) -> Option<u64>,
}

impl Search<'_> {
    fn fits(&self, job: &Job) -> Option<u64> {
        (self.peak)(job).filter(|peak| *peak <= self.available)
    }

    /// Returns the advice to make only this change, or `None` if the job would still not fit.
    fn with(&self, job: &Job, change: Change) -> Option<Advice> {
        let (job, text) = match change {
            Change::Batch => self.smaller_batch(job)?,
            Change::Ranks => self.more_ranks(job)?,
            change => apply(job, change)?,
        };
        let peak = self.fits(&job)?;
        Some(Advice {
            change: text,
            job,
            peak,
        })
    }

    /// Applies changes one by one until the job fits.
    fn together(&self, job: &Job, changes: &[Change]) -> Option<Advice> {
        let mut changed = job.clone();
        let mut texts: Vec<String> = Vec::new();
        for change in changes.iter().copied() {
            if let Some(last) = self.with(&changed, change) {
                texts.push(last.change);
                return Some(Advice {
                    change: texts.join(", "),
                    ..last
                });
            }
            if let Some((next, text)) = apply(&changed, change)
                && (self.peak)(&next).is_some()
            {
                texts.push(text);
                changed = next;
            }
        }
        None
    }

    /// Finds the largest batch that fits.
    fn smaller_batch(&self, job: &Job) -> Option<(Job, String)> {
        let with = |batch: usize| Job {
            batch,
            ..job.clone()
        };
        let (mut fits, mut exceeds) = (0, job.batch);
        while exceeds - fits > 1 {
            let middle = fits + (exceeds - fits) / 2;
            match self.fits(&with(middle)) {
                Some(_) => fits = middle,
                None => exceeds = middle,
            }
        }
        (fits > 0).then(|| (with(fits), format!("a batch of {fits} per rank")))
    }

    /// Finds the smallest number of ranks that fits.
    fn more_ranks(&self, job: &Job) -> Option<(Job, String)> {
        let with = |ranks: usize| Job {
            ranks,
            ..job.clone()
        };
        self.fits(&with(MAX_RANKS))?;
        let (mut exceeds, mut fits) = (job.ranks, MAX_RANKS);
        while fits - exceeds > 1 {
            let middle = exceeds + (fits - exceeds) / 2;
            match self.fits(&with(middle)) {
                Some(_) => fits = middle,
                None => exceeds = middle,
            }
        }
        Some((with(fits), format!("{fits} ranks")))
    }
}

/// Applies a change to its full extent, such as a batch of 1. Returns `None` for a change of ranks, and if the job
/// already has the change.
fn apply(job: &Job, change: Change) -> Option<(Job, String)> {
    let mut job = job.clone();
    let text = match change {
        Change::Divide if job.strategy != Strategy::FullShard => {
            job.strategy = Strategy::FullShard;
            "full sharding"
        }
        Change::Selective if job.checkpointing == Checkpointing::None => {
            job.checkpointing = Checkpointing::Selective;
            "selective activation checkpointing"
        }
        Change::Full if job.checkpointing != Checkpointing::Full => {
            job.checkpointing = Checkpointing::Full;
            "full activation checkpointing"
        }
        Change::Demand if job.prefetch > 0 => {
            job.prefetch = 0;
            "no prefetching"
        }
        Change::Offload if !job.is_offloaded => {
            job.is_offloaded = true;
            "offload of parameters, gradients and optimizer state to the host"
        }
        Change::Batch if job.batch > 1 => {
            job.batch = 1;
            "a batch of 1 per rank"
        }
        _ => return None,
    };
    Some((job, text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formula::job::Precision;
    use crate::formula::transformer::tests::gpt_175b;

    fn job(ranks: usize, batch: usize) -> Job {
        Job {
            model: gpt_175b(),
            ranks,
            batch,
            seq: 2048,
            precision: Precision::Bf16,
            strategy: Strategy::FullShard,
            checkpointing: Checkpointing::Full,
            is_offloaded: false,
            prefetch: 1,
        }
    }

    fn advice(job: &Job, available: u64) -> Vec<Advice> {
        advise(job, available, &|job| Some(job.peak_bytes()))
    }

    #[test]
    fn the_smallest_number_of_ranks_fits_and_one_less_does_not() {
        let available = 80 << 30;
        let found = advice(&job(16, 1), available);
        let more = found.iter().find(|a| a.change.ends_with("ranks")).unwrap();
        assert!(more.peak <= available);
        let fewer = Job {
            ranks: more.job.ranks - 1,
            ..more.job.clone()
        };
        assert!(fewer.peak_bytes() > available);
    }

    #[test]
    fn the_largest_batch_fits_and_one_more_does_not() {
        let available = 80 << 30;
        let found = advice(&job(128, 64), available);
        let less = found.iter().find(|a| a.change.contains("batch")).unwrap();
        let larger = Job {
            batch: less.job.batch + 1,
            ..less.job.clone()
        };
        assert!(less.peak <= available && larger.peak_bytes() > available);
    }

    #[test]
    fn changes_are_combined_if_necessary_and_advice_always_suffices() {
        let hungry = Job {
            checkpointing: Checkpointing::None,
            ..job(8, 64)
        };
        let together = advice(&hungry, 40 << 30);
        assert!(!together.is_empty());
        assert!(together[0].change.contains(", "), "{}", together[0].change);
        assert!(advice(&hungry, 1 << 20).is_empty());
    }

    #[test]
    fn more_ranks_take_less_each_and_states_are_divided() {
        let bytes = |ranks| job(ranks, 1).peak().bytes;
        let states = |ranks| bytes(ranks).parameters + bytes(ranks).optimizer_state;
        assert_eq!(states(128) / states(256), 2);
        assert!(bytes(256).total() < bytes(128).total());
        assert_eq!(bytes(256).full_parameters, bytes(128).full_parameters);
    }
}
