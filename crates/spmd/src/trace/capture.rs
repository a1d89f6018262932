//! Burn's capture device: operations are recorded, not run.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_backend::TensorMetadata;
use burn_capture::{CaptureBackend, CapturedGraph};
use burn_ir::{OperationIr, TensorId};

use crate::Error;
use crate::graph::operation_name;

/// The capture backend under autodiff. Nothing is checkpointed: what to recompute is decided by a
/// pass that sees the whole step.
pub(super) type Tape = Autodiff<CaptureBackend, NoCheckpointing>;

/// A tensor of the capture device as the graph knows it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Captured {
    pub(super) id: TensorId,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
}

impl Captured {
    pub(super) fn of(tensor: &burn_router::RouterTensor<burn_capture::CaptureClient>) -> Self {
        Self {
            id: tensor.id(),
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype(),
        }
    }
}

/// The captured tensor behind a float tensor, tracked or not; `None` if it is on another device.
pub(super) fn float_id<const D: usize>(tensor: &Tensor<D>) -> Option<Captured> {
    if let Ok(tracked) = tensor.clone().try_into_primitive::<Tape>() {
        return Some(Captured::of(tracked.primitive()));
    }
    let plain = tensor.clone().try_into_primitive::<CaptureBackend>();
    plain.ok().map(|plain| Captured::of(&plain))
}

/// The captured tensor behind an int tensor.
pub(super) fn int_id<const D: usize>(tensor: &Tensor<D, Int>) -> Option<Captured> {
    if let Ok(tensor) = tensor.clone().try_into_primitive::<Tape>() {
        return Some(Captured::of(&tensor));
    }
    let plain = tensor.clone().try_into_primitive::<CaptureBackend>();
    plain.ok().map(|plain| Captured::of(&plain))
}

/// The captured tensor behind a bool tensor.
pub(super) fn bool_id<const D: usize>(tensor: &Tensor<D, Bool>) -> Option<Captured> {
    if let Ok(tensor) = tensor.clone().try_into_primitive::<Tape>() {
        return Some(Captured::of(&tensor));
    }
    let plain = tensor.clone().try_into_primitive::<CaptureBackend>();
    plain.ok().map(|plain| Captured::of(&plain))
}

/// Capture devices that are not in use: their ids are 16 bits and never recycled, so that devices
/// are.
static IDLE: Mutex<Vec<Device>> = Mutex::new(Vec::new());

/// A capture device that nobody else uses.
pub(super) struct Lease(Option<Device>);

impl Lease {
    pub(super) fn take() -> Self {
        let mut idle = IDLE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Self(Some(idle.pop().unwrap_or_else(Device::capture)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut idle = IDLE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        idle.extend(self.0.take());
    }
}

/// What was recorded, and what the recorder returned.
pub(super) struct Recording<T> {
    pub(super) operations: Vec<OperationIr>,
    pub(super) values: Vec<(TensorId, TensorData)>,
    pub(super) result: T,
}

/// Which part of a recording is running, for errors.
pub(super) struct Progress(Cell<&'static str>);

impl Progress {
    pub(super) fn enter(&self, stage: &'static str) {
        self.0.set(stage);
    }
}

/// Records what `record` does on the capture device that it is given.
///
/// # Errors
///
/// What `record` returns, or [`Error::Uncapturable`] if it panics: that is how Burn refuses what the
/// capture device cannot do.
pub(super) fn record<T>(
    stage: &'static str,
    record: impl FnOnce(&Device, &Progress) -> Result<T, Error>,
) -> Result<Recording<T>, Error> {
    record_on(&Lease::take(), stage, record)
}

/// [`record`] on a device that the caller keeps: tensors that outlive the recording can only be moved to
/// another one.
///
/// # Errors
///
/// As [`record`].
pub(super) fn record_on<T>(
    lease: &Lease,
    stage: &'static str,
    record: impl FnOnce(&Device, &Progress) -> Result<T, Error>,
) -> Result<Recording<T>, Error> {
    let device = lease.0.clone().unwrap_or_else(Device::capture);
    let progress = Progress(Cell::new(stage));
    let mut outcome = None;
    let captured = device.capture_scope(|scope| {
        // Caught inside the scope, so that what was recorded until then can name the operation.
        outcome = Some(catch_unwind(AssertUnwindSafe(|| {
            record(&device, &progress)
        })));
        scope.complete([], [])
    });
    let (operations, values) = match captured {
        Ok(CapturedGraph { graph, values }) => (graph.operations, values),
        Err(error) => return Err(failed(&progress, error.to_string(), &[])),
    };
    match outcome {
        Some(Ok(result)) => Ok(Recording {
            operations,
            values: values.into_iter().collect(),
            result: result?,
        }),
        Some(Err(payload)) => Err(failed(&progress, message(payload.as_ref()), &operations)),
        None => Err(Error::Internal("the capture scope did not run".to_owned())),
    }
}

fn failed(progress: &Progress, reason: String, operations: &[OperationIr]) -> Error {
    Error::Uncapturable {
        stage: progress.0.get(),
        produced_by: mentioned(&reason, operations),
        reason,
    }
}

/// The operation that writes the tensor that a message of Burn mentions as `TensorId(7)`.
fn mentioned(reason: &str, operations: &[OperationIr]) -> Option<String> {
    let (_, rest) = reason.split_once("TensorId(")?;
    let (number, _) = rest.split_once(')')?;
    let id = TensorId::new(number.parse().ok()?);
    let writes = |op: &&OperationIr| op.outputs().any(|output| output.id == id);
    let operation = operations.iter().find(writes)?;
    let shape = operation.outputs().find(|output| output.id == id)?;
    Some(format!(
        "{} of shape {:?}",
        operation_name(operation),
        shape.shape.to_vec()
    ))
}

/// What a panic said.
pub(crate) fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<String>() {
        return text.clone();
    }
    match payload.downcast_ref::<&'static str>() {
        Some(text) => (*text).to_owned(),
        None => "a panic without a message".to_owned(),
    }
}
