//! The outputs of steps in transit to rank 0, which passes them to the metrics.

use std::collections::VecDeque;

use burn::data::dataloader::Progress;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::{Bytes, Device};
use burn::train::{InferenceStep, LearnerModel, TrainStep, TrainingItem};
use burn_fsdp_collectives::{BufferPool, ElementType, Part, ProcessGroup, Source};
use burn_fsdp_mesh::Partition;
use parking_lot::Mutex;

use crate::portable::{Parcel, Portable};
use burn_fsdp_glue::error::Error;
use burn_fsdp_glue::snapshot::Elements;

/// The outputs of a training run and its validations.
pub(crate) struct Outputs<M: LearnerModel> {
    pub(crate) training: Channel<<M as TrainStep>::Output>,
    pub(crate) validation: Channel<<M as InferenceStep>::Output>,
}

impl<M: LearnerModel> Outputs<M> {
    pub(crate) fn of_ranks(ranks: usize, codecs: Option<Codecs<M>>) -> Self {
        Self {
            training: Channel::of_ranks(ranks, codecs.map(|of| of.training)),
            validation: Channel::of_ranks(ranks, codecs.map(|of| of.validation)),
        }
    }
}

/// The codecs for sending a model's step outputs between processes.
pub(crate) struct Codecs<M: LearnerModel> {
    training: Codec<<M as TrainStep>::Output>,
    validation: Codec<<M as InferenceStep>::Output>,
}

impl<M: LearnerModel> Codecs<M>
where
    <M as TrainStep>::Output: Portable,
    <M as InferenceStep>::Output: Portable,
{
    pub(crate) fn new() -> Self {
        Self {
            training: Codec::new(),
            validation: Codec::new(),
        }
    }
}

impl<M: LearnerModel> Clone for Codecs<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: LearnerModel> Copy for Codecs<M> {}

/// The outputs of training or of validation on their way to rank 0. Threads store them where rank 0 finds them;
/// processes send them.
pub(crate) struct Channel<O> {
    /// The outputs that have arrived at rank 0, by rank.
    arrived: Vec<Mutex<VecDeque<TrainingItem<O>>>>,
    /// `None` if ranks are threads.
    codec: Option<Codec<O>>,
    /// The encoded outputs of this process that wait to be sent to rank 0. An accumulated step returns several.
    waiting: Mutex<Vec<Bytes>>,
}

impl<O> Channel<O> {
    fn of_ranks(ranks: usize, codec: Option<Codec<O>>) -> Self {
        Self {
            arrived: (0..ranks).map(|_| Mutex::default()).collect(),
            codec,
            waiting: Mutex::default(),
        }
    }

    /// Stores the output of a step of `rank`.
    pub(crate) fn put(&self, rank: usize, item: TrainingItem<O>) -> Result<(), Error> {
        match self.codec {
            Some(codec) if rank > 0 => self.waiting.lock().push((codec.encode)(item)?),
            _ => self.arrived[rank].lock().push_back(item),
        }
        Ok(())
    }

    /// Returns the sizes in bytes of the outputs that wait in this process.
    pub(crate) fn waiting(&self) -> Vec<usize> {
        self.waiting
            .lock()
            .iter()
            .map(|bytes| bytes.len())
            .collect()
    }

    /// Sends the waiting outputs of other processes to rank 0, which decodes them on `device` with the learning rates
    /// `rates`. `waiting` has the sizes of the outputs that wait in each process.
    ///
    /// Collective: one operation, or none if nothing waits, as with threads.
    pub(crate) fn bring(
        &self,
        world: &ProcessGroup,
        waiting: &[Vec<usize>],
        device: &Device,
        rates: Option<&ModuleLearningRate>,
    ) -> Result<(), Error> {
        let of_ranks = waiting.iter().enumerate();
        let sent =
            of_ranks.flat_map(|(sender, sizes)| sizes.iter().map(move |size| (sender, *size)));
        let sent: Vec<(usize, usize)> = sent.collect();
        let Some(codec) = self.codec.filter(|_| !sent.is_empty()) else {
            return Ok(());
        };
        let (rank, ranks) = (world.rank(), world.size());
        let mut own = std::mem::take(&mut *self.waiting.lock()).into_iter();
        // A separate pool: the world's pool is for the buffers of steps, whose sizes recur.
        let pool = BufferPool::new();
        let (mut parts, mut into) = (Vec::new(), Vec::new());
        for (sender, size) in &sent {
            let partition = Partition::one_owner(*size, ranks, *sender)?;
            let bytes = (*sender == rank).then(|| own.next()).flatten();
            let source = bytes.map_or_else(Source::empty, |bytes| Source::new(Elements(bytes)));
            parts.push(Part::new(source, partition, ElementType::U8));
            if rank == 0 {
                into.push(pool.take(*size));
            }
        }
        let received = world.gather("outputs for the metrics", Vec::new(), 0, parts, into)?;
        for ((sender, _), buffer) in sent.iter().zip(received.buffers) {
            let bytes = Bytes::from_bytes_vec(buffer.as_ref().to_vec());
            let item = (codec.decode)(bytes, device, rates)?;
            self.arrived[*sender].lock().push_back(item);
        }
        Ok(())
    }

    /// Takes one output of each rank that has one, in rank order.
    pub(crate) fn take(&self) -> impl Iterator<Item = TrainingItem<O>> {
        let arrived = self.arrived.iter();
        arrived.filter_map(|items| items.lock().pop_front())
    }
}

type Decode<O> = fn(Bytes, &Device, Option<&ModuleLearningRate>) -> Result<TrainingItem<O>, Error>;

/// Encodes outputs as bytes and decodes them. The bytes lack the learning rates, which are the same on all ranks.
struct Codec<O> {
    encode: fn(TrainingItem<O>) -> Result<Bytes, Error>,
    decode: Decode<O>,
}

impl<O> Clone for Codec<O> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<O> Copy for Codec<O> {}

const ITERATION: &str = "iteration";
const HAD: &str = "had";
const OF: &str = "of";

impl<O: Portable> Codec<O> {
    fn new() -> Self {
        Self {
            encode: |item| {
                let mut parcel = Parcel::new();
                item.item.pack(&mut parcel);
                let numbers = [
                    (ITERATION, item.iteration.unwrap_or(0) as u64),
                    (HAD, item.progress.items_processed as u64),
                    (OF, item.progress.items_total as u64),
                ];
                parcel.into_bytes(&numbers)
            },
            decode: |bytes, device, rates| {
                let (mut parcel, numbers) = Parcel::of_bytes(bytes)?;
                let number = |name: &str| {
                    let number = numbers.get(name).ok_or_else(|| Error::Parcel {
                        name: name.to_owned(),
                        reason: "is missing".to_owned(),
                    })?;
                    Ok::<_, Error>(*number as usize)
                };
                let progress = progress(number(HAD)?, number(OF)?);
                let iteration = Some(number(ITERATION)?);
                let item = O::unpack(&mut parcel, device)?;
                Ok(TrainingItem::new(item, progress, iteration, rates.cloned()))
            },
        }
    }
}

/// Returns the progress of an epoch: `had` items of `of`.
pub(crate) fn progress(had: usize, of: usize) -> Progress {
    Progress::new(had, of, Some("items".to_owned()))
}
