//! The outputs of steps on their way to rank 0, which shows them to the metrics.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Mutex;

use burn::data::dataloader::Progress;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::{Bytes, Device};
use burn::train::{InferenceStep, LearnerModel, TrainStep, TrainingItem};
use burn_fsdp_collectives::{ElementType, Part, ProcessGroup, Source};
use burn_fsdp_mesh::Partition;

use crate::error::Error;
use crate::train::lock::held;
use crate::train::portable::{Parcel, Portable};

/// The outputs of a training and of its validations.
pub(crate) struct Outputs<M: LearnerModel> {
    pub(crate) training: Channel<<M as TrainStep>::Output>,
    pub(crate) validation: Channel<<M as InferenceStep>::Output>,
}

impl<M: LearnerModel> Outputs<M> {
    pub(crate) fn of_ranks(ranks: usize, carriage: Option<Carriage<M>>) -> Self {
        Self {
            training: Channel::of_ranks(ranks, carriage.map(|of| of.training)),
            validation: Channel::of_ranks(ranks, carriage.map(|of| of.validation)),
        }
    }
}

/// How the outputs of a model's steps travel between processes.
pub(crate) struct Carriage<M: LearnerModel> {
    training: Codec<<M as TrainStep>::Output>,
    validation: Codec<<M as InferenceStep>::Output>,
}

impl<M: LearnerModel> Carriage<M>
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

impl<M: LearnerModel> Clone for Carriage<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: LearnerModel> Copy for Carriage<M> {}

impl<M: LearnerModel> fmt::Debug for Carriage<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Carriage")
    }
}

/// The outputs of one kind. Among threads each rank puts its own where rank 0 finds them; among processes those of
/// the other ranks are carried there.
pub(crate) struct Channel<O> {
    /// What has come to rank 0, by rank.
    arrived: Vec<Mutex<VecDeque<TrainingItem<O>>>>,
    /// None among threads.
    codec: Option<Codec<O>>,
    /// What this process has for rank 0, if it is another.
    waiting: Mutex<Vec<u8>>,
}

impl<O> Channel<O> {
    fn of_ranks(ranks: usize, codec: Option<Codec<O>>) -> Self {
        Self {
            arrived: (0..ranks).map(|_| Mutex::default()).collect(),
            codec,
            waiting: Mutex::default(),
        }
    }

    /// Takes the output of a step of `rank`. It is carried before the rank's next step.
    pub(crate) fn put(&self, rank: usize, item: TrainingItem<O>) -> Result<(), Error> {
        match self.codec {
            Some(codec) if rank > 0 => *held(&self.waiting) = (codec.encode)(item)?,
            _ => held(&self.arrived[rank]).push_back(item),
        }
        Ok(())
    }

    /// Brings what waits in other processes to rank 0, as outputs of a step at these rates, on `device`.
    ///
    /// Collective: two operations among processes, of which the second is left out where no output waits; none among threads.
    pub(crate) fn carry(
        &self,
        world: &ProcessGroup,
        device: &Device,
        rates: Option<&ModuleLearningRate>,
    ) -> Result<(), Error> {
        let Some(codec) = self.codec else {
            return Ok(());
        };
        let (rank, ranks) = (world.rank(), world.size());
        let own = std::mem::take(&mut *held(&self.waiting));
        let size = (own.len() as u64).to_le_bytes().to_vec();
        let sizes = world.exchange("sizes of outputs", size)?;
        let sizes = sizes.iter().map(|bytes| size_in(bytes)).enumerate();
        let senders: Vec<_> = sizes.filter(|(_, size)| *size > 0).collect();
        if senders.is_empty() {
            return Ok(());
        }
        let mut own = Some(own);
        let (mut parts, mut into) = (Vec::new(), Vec::new());
        for (sender, size) in &senders {
            let partition = Partition::one_owner(*size, ranks, *sender)?;
            let bytes = own.take_if(|_| *sender == rank);
            let source = bytes.map_or_else(Source::empty, Source::new);
            parts.push(Part::new(source, partition, ElementType::U8));
            if rank == 0 {
                into.push(world.pool().take(*size));
            }
        }
        let received = world.gather("outputs for the metrics", Vec::new(), 0, parts, into)?;
        for ((sender, _), buffer) in senders.iter().zip(received.buffers) {
            let bytes = Bytes::from_bytes_vec(buffer.as_ref().to_vec());
            let item = (codec.decode)(bytes, device, rates)?;
            held(&self.arrived[*sender]).push_back(item);
        }
        Ok(())
    }

    /// Takes one output of each rank that has one, in the order of ranks.
    pub(crate) fn take(&self) -> impl Iterator<Item = TrainingItem<O>> {
        let arrived = self.arrived.iter();
        arrived.filter_map(|items| held(items).pop_front())
    }
}

/// Reads a size; one that no rank has written is of nothing.
fn size_in(bytes: &[u8]) -> usize {
    let bytes = bytes.try_into().map(u64::from_le_bytes);
    bytes
        .ok()
        .and_then(|size| size.try_into().ok())
        .unwrap_or(0)
}

type Decode<O> = fn(Bytes, &Device, Option<&ModuleLearningRate>) -> Result<TrainingItem<O>, Error>;

/// How outputs become bytes, and outputs again. Rates are not in the bytes: all ranks have the same.
struct Codec<O> {
    encode: fn(TrainingItem<O>) -> Result<Vec<u8>, Error>,
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
                // Whatever it was computed on, its data are the host's.
                let mut parcel = Parcel::new(&Device::default());
                item.item.pack(&mut parcel);
                let numbers = [
                    (ITERATION, item.iteration.unwrap_or(0) as u64),
                    (HAD, item.progress.items_processed as u64),
                    (OF, item.progress.items_total as u64),
                ];
                Ok(parcel.into_bytes(&numbers)?.to_vec())
            },
            decode: |bytes, device, rates| {
                let (mut parcel, numbers) = Parcel::of_bytes(bytes, device)?;
                let number = |name: &str| {
                    let number = numbers.get(name).ok_or_else(|| Error::Parcel {
                        name: name.to_owned(),
                        reason: "is not in it".to_owned(),
                    })?;
                    Ok::<_, Error>(*number as usize)
                };
                let progress = progress(number(HAD)?, number(OF)?);
                let iteration = Some(number(ITERATION)?);
                let item = O::unpack(&mut parcel)?;
                Ok(TrainingItem::new(item, progress, iteration, rates.cloned()))
            },
        }
    }
}

/// Returns how far an epoch is.
pub(crate) fn progress(had: usize, of: usize) -> Progress {
    Progress::new(had, of, Some("items".to_owned()))
}
