//! The batches of all ranks, in rounds: in each round, every rank runs one step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use burn_fsdp_collectives::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::notes::exchanged;
use crate::stop::Stop;
use burn_fsdp_glue::error::Error;

/// A rank's part of a loader's items, and the loader of all items, from which a rank that has run out takes a batch.
pub(crate) struct Share<I> {
    pub(crate) own: Arc<dyn DataLoader<I>>,
    pub(crate) all: Arc<dyn DataLoader<I>>,
}

impl<I> Share<I> {
    /// Splits a loader into contiguous ranges, one per rank; the first ranks get one more item if the split is uneven.
    pub(crate) fn of_ranks(loader: &Arc<dyn DataLoader<I>>, devices: &[Device]) -> Vec<Self> {
        let items = loader.num_items();
        let (each, more) = (items / devices.len(), items % devices.len());
        let mut start = 0;
        let shares = devices.iter().enumerate().map(|(rank, device)| {
            let end = start + each + usize::from(rank < more);
            let own = loader.slice(start, end).to_device(device);
            start = end;
            let all = loader.to_device(device);
            Self { own, all }
        });
        shares.collect()
    }
}

/// The batches of one rank in one epoch.
pub(crate) struct Rounds<'a, I> {
    label: &'static str,
    own: Box<dyn DataLoaderIterator<I> + 'a>,
    all: &'a dyn DataLoader<I>,
    /// Number of items that this rank has received.
    had: usize,
    /// Number of items that all ranks have received.
    had_by_all: usize,
}

/// A rank's part in one round.
pub(crate) struct Round<I> {
    pub(crate) batch: I,
    /// True if the batch is this rank's own; false if the rank processes it only so that others can continue.
    pub(crate) counts: bool,
    /// The factor for this rank's gradient that turns the mean over ranks into the mean over items. It is 1 if all
    /// ranks have the same number of items.
    pub(crate) weight: f64,
    /// True if no rank has a batch after this one.
    pub(crate) is_last: bool,
    /// Number of items that all ranks have received, including this round.
    pub(crate) had_by_all: usize,
}

/// The outcome of a round's agreement, and the sizes in bytes of the outputs that wait on each rank.
pub(crate) struct Turn<I> {
    pub(crate) next: Next<I>,
    pub(crate) waiting: Vec<Vec<usize>>,
}

/// The ranks' agreement about a round.
pub(crate) enum Next<I> {
    Round(Round<I>),
    /// No rank has items left.
    Through,
    /// A rank must stop, or its loader failed: the rank and the reason. Only that rank also has the loader's failure.
    Stopped(Option<DatasetError>, (usize, Stop)),
}

impl<'a, I> Rounds<'a, I> {
    pub(crate) fn new(label: &'static str, share: &'a Share<I>) -> Self {
        Self {
            label,
            own: share.own.iter(),
            all: &*share.all,
            had: 0,
            had_by_all: 0,
        }
    }

    /// Takes this rank's next batch, and agrees with the other ranks on its use. If one rank stops, all stop.
    ///
    /// Collective.
    ///
    /// # Errors
    ///
    /// A failed collective, and [`Error::OtherTraining`] if ranks used different learning rates in the last step.
    pub(crate) fn next(&mut self, world: &ProcessGroup, own: Own) -> Result<Turn<I>, Error> {
        let (batch, failure) = match self.own.next() {
            Some(Ok(batch)) => (Some(batch), None),
            Some(Err(failure)) => (None, Some(failure)),
            None => (None, None),
        };
        let progress = self.own.progress();
        let items = match batch {
            // A loader that does not count its items has returned at least one.
            Some(_) => progress.items_processed.saturating_sub(self.had).max(1),
            None => 0,
        };
        self.had = progress.items_processed;
        let has_more = batch.is_some() && !progress.is_completed();
        let note = Note {
            items: items as u64,
            has_more,
            own: Own {
                stop: match &failure {
                    Some(failure) => Some(Stop::Failed(failure.to_string())),
                    None => own.stop,
                },
                ..own
            },
        };
        let notes = exchanged(world, self.label, &note)?;
        let waiting = notes.iter().map(|note| note.own.waiting.clone()).collect();
        let turn = |next| Ok(Turn { next, waiting });
        if let Some(first) = Stop::first(notes.iter().map(|note| note.own.stop.clone())) {
            return turn(Next::Stopped(failure, first));
        }
        if let Some(rank) = notes.iter().position(|note| note.own.rates != own.rates) {
            return Err(Error::OtherTraining {
                what: "the learning rates of the last step",
                rank,
            });
        }
        let of_all: u64 = notes.iter().map(|note| note.items).sum();
        if of_all == 0 {
            return turn(Next::Through);
        }
        self.had_by_all += of_all as usize;
        let counts = batch.is_some();
        let batch = match batch {
            Some(batch) => batch,
            // Some rank has an item, so the loader of all items has one.
            None => match self.all.iter().next() {
                Some(Ok(batch)) => batch,
                Some(Err(failure)) => return Err(Error::Loader(failure.to_string())),
                None => {
                    return Err(Error::Loader(
                        "it has no items when it is read again".to_owned(),
                    ));
                }
            },
        };
        let weight = if notes.iter().all(|note| note.items == notes[0].items) {
            1.0
        } else {
            (items * notes.len()) as f64 / of_all as f64
        };
        turn(Next::Round(Round {
            batch,
            counts,
            weight,
            is_last: !notes.iter().any(|note| note.has_more),
            had_by_all: self.had_by_all,
        }))
    }
}

/// A rank's message to the others about its next batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    items: u64,
    has_more: bool,
    own: Own,
}

/// A rank's own state before a round, as sent to the other ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Own {
    pub(crate) stop: Option<Stop>,
    /// The fingerprint of the last step's learning rates.
    pub(crate) rates: u64,
    /// Sizes in bytes of the outputs that wait to be sent to rank 0.
    pub(crate) waiting: Vec<usize>,
}

/// The factor by which a rank's gradients are multiplied before they are reduced.
#[derive(Debug, Clone)]
pub(crate) struct Weight(Arc<AtomicU64>);

impl Weight {
    pub(crate) fn one() -> Self {
        Self(Arc::new(AtomicU64::new(1f64.to_bits())))
    }

    pub(crate) fn set(&self, weight: f64) {
        self.0.store(weight.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }
}
