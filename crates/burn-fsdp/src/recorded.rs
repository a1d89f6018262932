//! One step of Burn's optimizer for one parameter, recorded on a device that computes nothing.
//!
//! - A captured tensor can be read once its id is an alias of one that has data. Before a recording ends, every tensor of the
//!   new state is given data of its shape and type, and the next recording begins by moving the state to its
//!   device, as Burn does before every step.
//! - That data is a window of zeros that all share. The start of the window tells which tensor of the state it is.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};
use burn_capture::{CaptureBackend, CaptureClient, CapturedGraph};
use burn_fsdp_shard::Probe;
use burn_ir::{OperationIr, TensorId};
use burn_pack::Scalar;
use burn_router::RouterClient;

use crate::optimizer_record::{OptimizerParts, RANK_KEY};

/// Bytes between the windows of two tensors of a state.
const STRIDE: usize = 64;

/// Calls `$body` with the const generic `$d` equal to `$rank`.
macro_rules! with_rank {
    ($rank:expr, $d:ident => $body:expr, $otherwise:expr) => {
        match $rank {
            1 => {
                const $d: usize = 1;
                $body
            }
            2 => {
                const $d: usize = 2;
                $body
            }
            3 => {
                const $d: usize = 3;
                $body
            }
            4 => {
                const $d: usize = 4;
                $body
            }
            5 => {
                const $d: usize = 5;
                $body
            }
            6 => {
                const $d: usize = 6;
                $body
            }
            _ => $otherwise,
        }
    };
}

pub(crate) use with_rank;

/// A parameter, as optimizers know it.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) id: ParamId,
    /// The path by which its group is found.
    pub(crate) path: Option<String>,
}

/// A tensor of a state.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slot {
    /// Its name in records, after the id.
    pub(crate) field: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

/// The step of a parameter of this shape, and of the types that it and its gradient have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind<const D: usize> {
    pub(crate) shape: [usize; D],
    pub(crate) dtype: DType,
    pub(crate) gradient: DType,
}

/// An optimizer with the state of one parameter, whose tensors have no elements.
#[derive(Clone)]
pub(crate) struct Outline {
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) slots: Vec<Slot>,
    /// The numbers of the state.
    pub(crate) scalars: Vec<(String, Scalar)>,
    /// The device of its tensors, which they must leave; `None` before the first recording.
    device: Option<Device>,
    zeros: Arc<Bytes>,
}

/// A recorded step.
pub(crate) struct Recorded {
    pub(crate) operations: Vec<OperationIr>,
    /// Data of the recording that is no tensor of the state before.
    pub(crate) constants: BTreeMap<TensorId, TensorData>,
    pub(crate) parameter: TensorId,
    pub(crate) gradient: TensorId,
    pub(crate) updated: TensorId,
    /// The tensors of the state before, by index of the slot.
    pub(crate) given: Vec<(TensorId, usize)>,
    /// The tensors of the new state, by slot.
    pub(crate) states: Vec<TensorId>,
    /// The optimizer after the step.
    pub(crate) outline: Outline,
}

/// What is known of a step before its recording ends.
struct Stepped {
    ids: [TensorId; 3],
    states: Vec<TensorId>,
    outline: Outline,
}

impl Outline {
    /// Takes an optimizer whose state is that of one parameter, and has these tensors after its next step.
    pub(crate) fn new(optimizer: ModuleOptimizer, slots: Vec<Slot>) -> Self {
        Self {
            optimizer,
            slots,
            scalars: Vec::new(),
            device: None,
            zeros: zeros(&[]),
        }
    }

    /// Returns the slot whose window that is.
    fn slot_of(&self, data: &TensorData) -> Option<usize> {
        let (base, at) = (
            self.zeros.as_ptr() as usize,
            data.as_bytes().as_ptr() as usize,
        );
        let offset = at.checked_sub(base)?;
        let slot = offset / STRIDE;
        (offset.is_multiple_of(STRIDE) && slot < self.slots.len()).then_some(slot)
    }

    /// Records a step.
    ///
    /// # Errors
    ///
    /// The reason, if the optimizer reads elements, or its state gets other tensors.
    pub(crate) fn record<const D: usize>(
        &self,
        place: &Place,
        learning_rate: f64,
        kind: Kind<D>,
    ) -> Result<Recorded, String> {
        let lease = Lease::take(self.device.as_ref());
        let device = &lease.0;
        let mut outcome = None;
        let captured = device.capture_scope(|scope| {
            outcome = Some(catch_unwind(AssertUnwindSafe(|| {
                self.step(place, learning_rate, kind, device)
            })));
            scope.complete([], [])
        });
        let CapturedGraph { graph, values } = captured.map_err(|error| error.to_string())?;
        let Stepped {
            ids,
            states,
            outline,
        } = match outcome {
            Some(Ok(stepped)) => stepped?,
            Some(Err(panic)) => return Err(text_of(panic.as_ref())),
            None => return Err("it was not recorded".to_owned()),
        };
        let [parameter, gradient, updated] = ids;
        let is_given = |op: &OperationIr| {
            op.outputs()
                .any(|out| out.id == parameter || out.id == gradient)
        };
        let operations = graph.operations.into_iter();
        let operations: Vec<_> = operations
            .filter(|op| !is_given(op) && !matches!(op, OperationIr::Init(_)))
            .collect();
        let (mut given, mut constants) = (Vec::new(), BTreeMap::new());
        for (id, data) in values {
            match self.device.as_ref().and_then(|_| self.slot_of(&data)) {
                Some(slot) => given.push((id, slot)),
                None => {
                    if operations
                        .iter()
                        .any(|op| op.inputs().any(|input| input.id == id))
                    {
                        constants.insert(id, data);
                    }
                }
            }
        }
        Ok(Recorded {
            operations,
            constants,
            parameter,
            gradient,
            updated,
            given,
            states,
            outline,
        })
    }

    /// Steps on a device that records, and gives the tensors of the new state data that the next recording recognises.
    fn step<const D: usize>(
        &self,
        place: &Place,
        learning_rate: f64,
        kind: Kind<D>,
        device: &Device,
    ) -> Result<Stepped, String> {
        let parameter = Tensor::<D>::empty(kind.shape, (device, kind.dtype));
        let gradient = Tensor::<D>::empty(kind.shape, (device, kind.gradient));
        let (client, first) = captured(&parameter)?;
        let (_, second) = captured(&gradient)?;
        let optimizer = self.optimizer.clone();
        let (optimizer, updated) = stepped(optimizer, place, learning_rate, parameter, gradient);
        let (_, updated) = captured(&updated)?;
        let end = client.create_empty_handle();
        for id in first.value()..end.value() {
            let own = TensorData::new(vec![id as i64], [1]);
            client.register_alias(TensorId::new(id), client.register_tensor_data(own).id());
        }
        let parts = OptimizerParts::take(&optimizer).map_err(|error| error.to_string())?;
        let (scalars, found) = state_of(&parts, place.id);
        let zeros = zeros(&self.slots);
        let mut states = Vec::with_capacity(self.slots.len());
        for (index, slot) in self.slots.iter().enumerate() {
            let id = found.get(&slot.field).copied();
            let id = id.ok_or_else(|| format!("its state has no `{}` after a step", slot.field))?;
            let data = window(&zeros, index, slot)?;
            client.register_alias(id, client.register_tensor_data(data).id());
            states.push(id);
        }
        let is_known = |field: &String| self.slots.iter().any(|slot| slot.field == *field);
        if let Some(field) = found.keys().find(|field| !is_known(field)) {
            return Err(format!("its state gets `{field}` in a later step"));
        }
        Ok(Stepped {
            ids: [first, second, updated],
            states,
            outline: Self {
                optimizer,
                slots: self.slots.clone(),
                scalars,
                device: Some(device.clone()),
                zeros,
            },
        })
    }
}

/// Makes a step of an optimizer with one parameter.
pub(crate) fn stepped<const D: usize>(
    mut optimizer: ModuleOptimizer,
    place: &Place,
    learning_rate: f64,
    parameter: Tensor<D>,
    gradient: Tensor<D>,
) -> (ModuleOptimizer, Tensor<D>) {
    let mut gradients = GradientsParams::new();
    gradients.register(place.id, gradient);
    let probe = Probe::new(segments(place), Param::initialized(place.id, parameter));
    let probe = optimizer.step(learning_rate, probe, gradients);
    (optimizer, probe.param().base())
}

/// Returns the names of the modules around a parameter, and its own.
pub(crate) fn segments(place: &Place) -> Vec<String> {
    let path = place.path.as_deref().unwrap_or_default();
    path.split('.').map(str::to_owned).collect()
}

/// Returns the numbers of a parameter's state, and the ids that stand for its tensors.
fn state_of(
    parts: &OptimizerParts,
    id: ParamId,
) -> (Vec<(String, Scalar)>, BTreeMap<String, TensorId>) {
    let scalars = parts.scalars_of(id.val());
    let tensors = parts.tensors_of(id.val()).filter_map(|(field, tensor)| {
        let bytes = tensor.to_bytes().ok()?;
        let number = i64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
        Some((field, TensorId::new(number as u64)))
    });
    let scalars = scalars.filter(|(field, _)| field != RANK_KEY);
    (scalars.collect(), tensors.collect())
}

fn captured<const D: usize>(tensor: &Tensor<D>) -> Result<(CaptureClient, TensorId), String> {
    match tensor.clone().try_into_primitive::<CaptureBackend>() {
        Ok(tensor) => Ok((tensor.client.clone(), tensor.id())),
        Err(_) => Err("it moves tensors to another device".to_owned()),
    }
}

/// Returns data of a slot's shape and type, at the start that tells the slot.
fn window(zeros: &Bytes, index: usize, slot: &Slot) -> Result<TensorData, String> {
    let size = slot.shape.iter().product::<usize>() * slot.dtype.size();
    let start = index * STRIDE;
    let bytes = zeros.view(start, start + size);
    let bytes = bytes.map_err(|error| format!("{error:?}"))?;
    let data = TensorData::try_from_bytes(bytes, slot.shape.clone(), slot.dtype);
    data.map_err(|error| error.to_string())
}

/// Returns zeros that are enough for windows of these slots.
fn zeros(slots: &[Slot]) -> Arc<Bytes> {
    static ZEROS: Mutex<Option<Arc<Bytes>>> = Mutex::new(None);
    let size = |slot: &Slot| slot.shape.iter().product::<usize>() * slot.dtype.size();
    let longest = slots.iter().map(size).max().unwrap_or_default();
    let needed = longest + STRIDE * (slots.len() + 1);
    let mut shared = ZEROS.lock().unwrap_or_else(PoisonError::into_inner);
    match shared.as_ref().filter(|zeros| zeros.len() >= needed) {
        Some(zeros) => zeros.clone(),
        None => {
            let zeros = Arc::new(Bytes::from_bytes_vec(vec![0; needed]).shared());
            shared.insert(zeros).clone()
        }
    }
}

/// Capture devices that are not in use: their ids are 16 bits and never recycled, so that devices are.
static IDLE: Mutex<Vec<Device>> = Mutex::new(Vec::new());

/// A capture device for the use of one recording at a time.
struct Lease(Device);

impl Lease {
    /// Takes a device other than the one that the tensors of a state have to leave.
    fn take(other_than: Option<&Device>) -> Self {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = idle.iter().position(|device| Some(device) != other_than);
        let device = found.map(|index| idle.swap_remove(index));
        Self(device.unwrap_or_else(Device::capture))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(self.0.clone());
    }
}

/// Returns the message of a panic.
fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(text), _) => text.clone(),
        (None, Some(text)) => (*text).to_owned(),
        (None, None) => "a panic without a message".to_owned(),
    }
}
