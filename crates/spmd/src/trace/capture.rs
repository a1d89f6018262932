//! Burn's capture device, which records operations instead of running them.

use std::cell::Cell;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::tensor::{
    Bool, BoolDType, DType, Device, DeviceConfig, FloatDType, Int, IntDType, Tensor, TensorData,
};
use burn_backend::TensorMetadata;
use burn_capture::{CaptureBackend, CapturedGraph};
use burn_ir::{OperationIr, TensorId};
use parking_lot::Mutex;

use crate::error::Error;
use crate::graph::operation_name;
use crate::panics::caught;

/// The capture backend with autodiff. It does no checkpointing, because a pass over the whole step decides what to
/// recompute.
pub(super) type Tape = Autodiff<CaptureBackend, NoCheckpointing>;

/// The id, shape and type of a tensor on the capture device.
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

/// Returns the captured tensor behind a float tensor, tracked or not; `None` if it is on another device.
pub(super) fn float_id<const D: usize>(tensor: &Tensor<D>) -> Option<Captured> {
    if let Ok(tracked) = tensor.clone().try_into_primitive::<Tape>() {
        return Some(Captured::of(tracked.primitive()));
    }
    let plain = tensor.clone().try_into_primitive::<CaptureBackend>();
    plain.ok().map(|plain| Captured::of(&plain))
}

/// Returns the captured tensor behind an int tensor.
pub(super) fn int_id<const D: usize>(tensor: &Tensor<D, Int>) -> Option<Captured> {
    if let Ok(tensor) = tensor.clone().try_into_primitive::<Tape>() {
        return Some(Captured::of(&tensor));
    }
    let plain = tensor.clone().try_into_primitive::<CaptureBackend>();
    plain.ok().map(|plain| Captured::of(&plain))
}

/// Returns the captured tensor behind a bool tensor.
pub(super) fn bool_id<const D: usize>(tensor: &Tensor<D, Bool>) -> Option<Captured> {
    if let Ok(tensor) = tensor.clone().try_into_primitive::<Tape>() {
        return Some(Captured::of(&tensor));
    }
    let plain = tensor.clone().try_into_primitive::<CaptureBackend>();
    plain.ok().map(|plain| Captured::of(&plain))
}

/// The default types of tensors on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Defaults {
    float: FloatDType,
    int: IntDType,
    bool: BoolDType,
}

impl Defaults {
    /// Returns the default types of the device on which the step will run, so the traced module has the types of the
    /// trained one.
    pub(crate) fn of(device: &Device) -> Self {
        let settings = device.settings();
        Self {
            float: settings.float_dtype,
            int: settings.int_dtype,
            bool: settings.bool_dtype,
        }
    }

    /// Returns the same defaults with another float type.
    pub(super) fn with_float(self, float: FloatDType) -> Self {
        Self { float, ..self }
    }
}

/// Idle capture devices. Their ids have 16 bits and are never recycled, so the devices are reused. Each keeps its
/// initial default types.
static IDLE: Mutex<Vec<(Option<Defaults>, Device)>> = Mutex::new(Vec::new());

/// A capture device for one recording at a time. Dropping the lease makes the device idle again.
pub(super) struct Lease {
    defaults: Option<Defaults>,
    device: Device,
    is_new: bool,
}

impl Lease {
    pub(super) fn take(defaults: Option<Defaults>) -> Self {
        let mut idle = IDLE.lock();
        let found = idle.iter().position(|(other, _)| *other == defaults);
        let (device, is_new) = match found {
            Some(index) => (idle.swap_remove(index).1, false),
            None => (Device::capture(), true),
        };
        Self {
            defaults,
            device,
            is_new,
        }
    }

    /// Sets the default types of a new device, before its first tensor and inside a capture scope.
    fn configure(&self) -> Result<(), Error> {
        let Some(Defaults { float, int, bool }) = self.defaults.filter(|_| self.is_new) else {
            return Ok(());
        };
        let config = DeviceConfig::default();
        let config = config.float_dtype(float).int_dtype(int).bool_dtype(bool);
        let configured = self.device.clone().configure(config);
        configured.map_err(|error| {
            Error::Internal(format!("the capture device has other types: {error}"))
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut idle = IDLE.lock();
        idle.push((self.defaults, self.device.clone()));
    }
}

/// A recording: operations, host data, and the result of the recorded closure.
pub(super) struct Recording<T> {
    pub(super) operations: Vec<OperationIr>,
    pub(super) values: Vec<(TensorId, TensorData)>,
    pub(super) result: T,
}

impl<T, R> Recording<(T, R)> {
    /// Splits off the second result.
    pub(super) fn split(self) -> (Recording<T>, R) {
        let (result, other) = self.result;
        let recording = Recording {
            operations: self.operations,
            values: self.values,
            result,
        };
        (recording, other)
    }
}

/// The part of a step that is being recorded, for error messages.
pub(super) struct Progress(Cell<&'static str>);

impl Progress {
    pub(super) fn enter(&self, stage: &'static str) {
        self.0.set(stage);
    }
}

/// Records the operations of `record`, which receives a capture device with these default types.
///
/// # Errors
///
/// The error of `record`, or [`Error::Uncapturable`] if it panics, because Burn panics on operations that the capture
/// device does not support.
pub(super) fn record_with<T>(
    stage: &'static str,
    defaults: Option<Defaults>,
    record: impl FnOnce(&Device, &Progress) -> Result<T, Error>,
) -> Result<Recording<T>, Error> {
    record_on(&Lease::take(defaults), stage, record)
}

/// Records as [`record_with`] does, on a device that the caller keeps. Tensors that outlive the recording support
/// nothing except a move to another device.
///
/// # Errors
///
/// Same as [`record_with`].
pub(super) fn record_on<T>(
    lease: &Lease,
    stage: &'static str,
    record: impl FnOnce(&Device, &Progress) -> Result<T, Error>,
) -> Result<Recording<T>, Error> {
    let device = lease.device.clone();
    let progress = Progress(Cell::new(stage));
    let mut outcome = None;
    let captured = device.capture_scope(|scope| {
        // Panics are caught inside the scope, so the recorded operations can name the failing one.
        outcome = Some(caught(|| {
            lease.configure()?;
            record(&device, &progress)
        }));
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
        Some(Err(panic)) => Err(failed(&progress, panic.text(), &operations)),
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

/// Returns the operation that writes the tensor that Burn's message names, such as `TensorId(7)`.
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
