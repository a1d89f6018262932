//! Collectives over the executor's tensors.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, FloatDType, Shape, Slice, TensorData};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_fsdp_collectives::{
    Buffer, CrossPart, ElementType, FullPart, Part, Pending, ProcessGroup, ReduceOp, Reduction,
    Seal, Sealed, Share, Source,
};
use burn_fsdp_tensors::{
    self as tensors, Staging, device_buffer, device_source, device_tensor, exchanges_on_devices,
    is_host_backend, reduced_type,
};
use burn_ir::{BackendIr, HandleKind, TensorId};

use crate::graph::{Collective, CollectiveKind, CollectivePart};

/// Collectives in progress, and the copies of all collectives between the host and a device.
#[derive(Default)]
pub(super) struct Flights {
    /// By the first value that the collective writes.
    pub(super) started: BTreeMap<TensorId, Started>,
    pub(super) staging: Staging,
}

/// A collective that has been started.
pub(super) struct Started {
    pending: Pending,
    /// Length of each result in elements, padding included, and its type.
    results: Vec<(usize, DType)>,
}

/// The reason why a collective did not run.
pub(super) enum Failure {
    Collective(burn_fsdp_collectives::Error),
    Other(String),
}

impl From<burn_fsdp_collectives::Error> for Failure {
    fn from(error: burn_fsdp_collectives::Error) -> Self {
        Self::Collective(error)
    }
}

/// The bytes that this rank contributes to a part, with the part and its element type.
type Given<'a> = (Source, &'a CollectivePart, ElementType);

fn crossed((source, part, element): Given<'_>) -> Result<CrossPart, Failure> {
    let missing = || Failure::Other(format!("{} is cut along only one dim", part.path));
    let across = part.across.ok_or_else(missing)?;
    Ok(CrossPart::new(source, part.partition, across, element))
}

/// A tensor of a collective, with its seal.
pub(super) type Sealable<B> = (HandleKind<B>, Option<Arc<Sealed>>);

/// The ranks along which a collective runs, and this rank's memory.
pub(super) struct Along<'a, B: BackendIr> {
    pub(super) group: &'a ProcessGroup,
    pub(super) staging: &'a Staging,
    pub(super) device: B::Device,
}

impl<B: BackendIr> Along<'_, B> {
    /// Returns true if the ranks exchange the tensors in the memory of their device: floats, and the ranks are threads.
    fn is_direct(&self, collective: &Collective, tensors: &[Option<Sealable<B>>]) -> bool {
        let is_float = |dtype: DType| dtype.is_float() && dtype != DType::Flex32;
        let mut given = tensors.iter().flatten();
        exchanges_on_devices(self.group)
            && !is_host_backend::<B>()
            && given.all(|(tensor, _)| matches!(tensor, HandleKind::Float(_)))
            && collective
                .parts
                .iter()
                .all(|part| is_float(part.dtype) && is_float(part.result))
    }

    /// Returns a buffer for `len` bytes of a result.
    fn buffer(&self, is_direct: bool, len: usize) -> Buffer {
        if is_direct {
            device_buffer::<B>(&self.device, len)
        } else {
            self.group.pool().take(len)
        }
    }
}

/// Starts a collective of these tensors, one per part. A tensor that another rank owns is `None`.
pub(super) fn start<B: BackendIr>(
    along: &Along<'_, B>,
    collective: &Collective,
    tensors: Vec<Option<Sealable<B>>>,
) -> Result<Started, Failure> {
    let (group, staging) = (along.group, along.staging);
    let is_direct = along.is_direct(collective, &tensors);
    let contract = collective.kind.contract();
    let mut given = Vec::new();
    let mut into = Vec::new();
    let mut results = Vec::new();
    for (part, tensor) in collective.parts.iter().zip(tensors) {
        let dtype = part.dtype;
        let element = collective.kind.element_of(dtype);
        let element =
            element.ok_or_else(|| Failure::Other(format!("{dtype:?} elements cannot be moved")))?;
        let (gives, gets) = (contract.gives.share, contract.gets.share);
        let len = |share| part.share_len(share, group.rank());
        let (is_here, result) = (tensor.is_some(), part.result);
        let source = match tensor {
            Some((HandleKind::Float(tensor), _)) if is_direct => {
                device_source::<B>(tensor, len(gives), None)
            }
            Some((tensor, sealed)) => {
                let num_bytes = len(gives) * dtype.size();
                source::<B>((group, staging), tensor, num_bytes, sealed)?
            }
            None => Source::new(Vec::new()),
        };
        given.push((source, part, element));
        // Copies of an owned value are combined among its owners.
        let (len, padded) = if is_here || gives != gets {
            (len(gets), part.padded_len(gets))
        } else {
            (0, 0)
        };
        let padded = match (part.partition.sole_owner(), gets) {
            (Some(owner), Share::Own) if owner != group.rank() => 0,
            _ => padded,
        };
        into.push(along.buffer(is_direct, len * result.size()));
        results.push((padded, result));
    }
    let label = collective.label.to_string();
    let reduction = reduction(collective);
    let given = given.into_iter();
    let part = |(source, part, element): Given<'_>| Part::new(source, part.partition, element);
    let note = Vec::new();
    let pending = match collective.kind {
        CollectiveKind::AllGather => {
            group.start_all_gather(label, note, given.map(part).collect(), into)?
        }
        CollectiveKind::ReduceScatter => {
            group.start_reduce_scatter(label, note, reduction, given.map(part).collect(), into)?
        }
        CollectiveKind::AllReduce => {
            let full = |(source, _, element): Given<'_>| FullPart::new(source, element);
            group.start_all_reduce(label, note, reduction, given.map(full).collect(), into)?
        }
        CollectiveKind::AllToAll => {
            let parts = given.map(crossed).collect::<Result<_, _>>()?;
            group.start_all_to_all(label, note, parts, into)?
        }
    };
    Ok(Started { pending, results })
}

/// A result of a collective, flat.
pub(super) enum Delivered<B: BackendIr> {
    /// On the host, with its seal if ranks compare bytes.
    Host(TensorData, Option<Seal>),
    /// On the executor's device.
    Device(FloatTensor<B>),
}

impl Started {
    /// Waits for the results, one per part. Only padded results are copied.
    pub(super) fn wait<B: BackendIr>(
        self,
        group: &ProcessGroup,
    ) -> Result<Vec<Delivered<B>>, Failure> {
        // Sources cannot be updated in place until the peers have read them.
        let received = self.pending.wait_released()?;
        let buffers = received.buffers.into_iter().zip(self.results);
        let mut seals = received.seals.into_iter();
        let mut results = Vec::new();
        for (buffer, (len, dtype)) in buffers {
            let mut seal = seals.next();
            let buffer = match device_tensor::<B>(buffer) {
                Ok(tensor) => {
                    results.push(Delivered::Device(padded::<B>(tensor, len)));
                    continue;
                }
                Err(buffer) => buffer,
            };
            let is_whole = buffer.len() == len * dtype.size();
            if let Some(seal) = seal.as_ref().filter(|_| !is_whole) {
                // A padded result is a copy, which has a separate seal.
                group.check_seal(seal, buffer.as_ref(), || "a result".to_owned())?;
            }
            let data = data(buffer, len, dtype);
            if !is_whole {
                seal = group.seal(data.as_bytes());
            }
            results.push(Delivered::Host(data, seal));
        }
        Ok(results)
    }
}

/// Returns a flat tensor of `len` elements, padded with zeros.
fn padded<B: BackendIr>(tensor: FloatTensor<B>, len: usize) -> FloatTensor<B> {
    let given = tensor.shape().num_elements();
    if given == len {
        return tensor;
    }
    let dtype = FloatDType::from(tensor.dtype());
    let zeros = B::float_zeros(Shape::from([len]), &tensor.device(), dtype);
    B::float_slice_assign(zeros, &[Slice::from(0..given)], tensor)
}

fn reduction(collective: &Collective) -> Reduction {
    Reduction {
        op: collective.reduction.unwrap_or(ReduceOp::Sum),
        output: collective.widened().and_then(reduced_type),
        ..Reduction::sum()
    }
}

/// Returns a received buffer as flat data of `len` elements, padded with zeros.
fn data(buffer: Buffer, len: usize, dtype: DType) -> TensorData {
    let num_bytes = len * dtype.size();
    if buffer.len() == num_bytes {
        tensors::data(buffer, [len], dtype)
    } else {
        let mut padded = vec![0; num_bytes];
        padded[..buffer.len()].copy_from_slice(buffer.as_ref());
        TensorData::from_bytes_vec(padded, [len], dtype)
    }
}

/// Returns the first `num_bytes` of a tensor in row-major order: from the tensor's memory on Flex, read back on other
/// backends.
///
/// The result carries the seal of the memory if it covers all of it; otherwise the seal is checked here.
fn source<B: BackendIr>(
    (group, staging): (&ProcessGroup, &Staging),
    tensor: HandleKind<B>,
    num_bytes: usize,
    sealed: Option<Arc<Sealed>>,
) -> Result<Source, Failure> {
    let Some(memory) = tensors::on_host(&tensor).cloned() else {
        let read = staging.read_back(tensor, num_bytes);
        return read.map_err(Failure::Other);
    };
    drop(tensor);
    // The seal covers the memory in its stored order; elements in a different order are other bytes.
    let (source, is_whole) = tensors::first_bytes(memory.clone(), num_bytes);
    if is_whole {
        return Ok(source.noted(sealed));
    }
    if let Some(sealed) = sealed {
        group.check_sealed(&sealed, memory.bytes())?;
    }
    Ok(source)
}
