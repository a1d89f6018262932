//! An optimizer that runs alongside the graph, on tensors with a parameter's shape and type but without memory.
//!
//! Each step is recorded on a separate capture device. Between two recordings the optimizer's state is kept unchanged,
//! including host values. This relies on two properties:
//!
//! - A captured tensor can be read if its id is an alias of a tensor with data. Before a recording ends, every tensor
//!   of the state gets data of its shape and type. The next recording begins by moving the state to its device, as Burn
//!   does before every step.
//! - This data is a window of zeros that are mapped but never touched, so it uses no memory under any allocator. The
//!   start of the window identifies the tensor of the state.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use burn::optim::{Optimizer, RecordState, StateSource};
use burn::tensor::{AllocationProperty, Bytes, DType, Tensor, TensorData};
use burn_capture::{CaptureBackend, CaptureClient};
use burn_fsdp_tensors::LowBits;
use burn_ir::{OperationIr, ScalarIr, TensorId};
use burn_pack::Scalar;
use burn_router::RouterClient;
use memmap2::MmapOptions;

use super::form::{Form, numbers, tensors_of};
use super::structure::{Slot, Structure, gradient_id, parameter_id, state_id};
use crate::error::Error;
use crate::graph::operation_name;
use crate::trace::capture::{Lease, Recording, float_id, record_on};

/// Distance between the windows of two tensors of a state, in bytes.
const STRIDE: usize = 64;

/// A state of the optimizer for one parameter, without the elements of its tensors.
pub(crate) struct TwinState {
    /// Host numbers of the state, by name.
    pub(crate) scalars: Vec<(String, Scalar)>,
    /// Indices of the slots that have a tensor.
    pub(crate) tensors: Vec<usize>,
    /// The optimizer's original state, and the device from which its tensors must be moved.
    live: Live,
}

struct Live {
    state: Box<dyn Any + Send + Sync>,
    _device: Lease,
}

impl fmt::Debug for TwinState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TwinState")
            .field("scalars", &self.scalars)
            .field("tensors", &self.tensors)
            .finish_non_exhaustive()
    }
}

/// A step of an optimizer for the parameters of one kind.
#[derive(Debug)]
pub(crate) struct TwinStep {
    pub(crate) structure: Structure,
    /// Scalars of the step, by operation.
    pub(crate) scalars: Vec<Vec<ScalarIr>>,
    /// The state after the step.
    pub(crate) next: Option<Arc<TwinState>>,
}

/// An optimizer for parameters of one shape and type.
pub(super) trait Twin: Send {
    /// Records one optimizer step from a state, or from none for the first step.
    fn step(&self, learning_rate: f64, state: Option<&TwinState>) -> Result<TwinStep, String>;

    /// Creates the state with these numbers and tensors.
    fn state(&self, scalars: &[(String, Scalar)], tensors: &[usize]) -> Result<TwinState, String>;

    /// Returns the tensors of its state.
    fn slots(&self) -> &Arc<Vec<Slot>>;
}

/// The purpose of a recording: to find the tensors of the state, or to step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Look {
    /// Finds the tensors of the new state. No further step can start from that state.
    First,
    Again,
}

pub(super) struct TwinOf<O: Optimizer, const D: usize> {
    optimizer: O,
    shape: [usize; D],
    dtype: DType,
    slots: Arc<Vec<Slot>>,
    zeros: Bytes,
}

/// A recorded step.
struct Recorded<S> {
    /// The recording. Its result is the ids of the parameter, its gradient and the new parameter.
    recording: Recording<[TensorId; 3]>,
    next: Option<(S, Form)>,
    /// The tensors of the new state.
    tensors: Vec<Slot>,
    /// The bits in which the new state is kept, if it is rounded.
    bits: Option<LowBits>,
    device: Lease,
}

impl<O: Optimizer, const D: usize> TwinOf<O, D> {
    /// Number of steps to record to find the tensors of the state.
    const LOOKAHEAD: usize = 3;

    pub(super) fn new(
        optimizer: &O,
        learning_rate: f64,
        shape: &[usize],
        dtype: DType,
    ) -> Result<Self, String> {
        let mut of = [0; D];
        of.copy_from_slice(shape);
        let mut twin = Self {
            optimizer: optimizer.clone(),
            shape: of,
            dtype,
            slots: Arc::default(),
            zeros: Bytes::from_bytes_vec(Vec::new()).shared(),
        };
        let mut state = None;
        for _ in 0..Self::LOOKAHEAD {
            let recorded = twin.record(learning_rate, state.as_ref(), Look::First)?;
            let Some((_, form)) = recorded.next else {
                break;
            };
            twin.declare(recorded.tensors)?;
            let slots = form.tensors.iter().map(|(name, _)| twin.slot(name));
            let slots = slots.collect::<Result<Vec<_>, _>>()?;
            state = Some(twin.state(&form.scalars, &slots)?);
        }
        Ok(twin)
    }

    /// Adds slots, and maps enough zeros for all of them.
    fn declare(&mut self, found: Vec<Slot>) -> Result<(), String> {
        let mut slots = self.slots.as_ref().clone();
        for slot in found {
            match slots.iter().find(|known| known.name == slot.name) {
                Some(known) if *known != slot => return Err(changed(known, &slot)),
                Some(_) => {}
                None => slots.push(slot),
            }
        }
        let size = |slot: &Slot| {
            let elements: usize = slot.shape.iter().product();
            elements * slot.dtype.size().max(DType::F32.size())
        };
        let longest = slots.iter().map(size).max().unwrap_or_default();
        let num_bytes = longest + STRIDE * slots.len();
        if self.zeros.len() < num_bytes {
            let zeros = MmapOptions::new().len(num_bytes).map_anon();
            let zeros =
                zeros.map_err(|error| format!("{num_bytes} bytes cannot be mapped: {error}"))?;
            let zeros = bytes::Bytes::from_owner(zeros);
            self.zeros = Bytes::from_shared(zeros, AllocationProperty::Other).shared();
        }
        self.slots = Arc::new(slots);
        Ok(())
    }

    fn slot(&self, name: &str) -> Result<usize, String> {
        let found = self.slots.iter().position(|slot| *slot.name == *name);
        found.ok_or_else(|| format!("its state gained the tensor \"{name}\" in a later step"))
    }

    /// Returns data of a slot's shape. Its start identifies the slot.
    fn window(&self, slot: usize, dtype: DType) -> Result<TensorData, String> {
        let shape = &self.slots[slot].shape;
        let size = shape.iter().product::<usize>() * dtype.size();
        let start = slot * STRIDE;
        let bytes = self.zeros.view(start, start + size);
        let bytes = bytes.map_err(|error| format!("{error:?}"))?;
        TensorData::try_from_bytes(bytes, shape.clone(), dtype).map_err(|error| error.to_string())
    }

    /// Returns the slot of this window.
    fn slot_of(&self, data: &TensorData) -> Option<usize> {
        let (base, at) = (
            self.zeros.as_ptr() as usize,
            data.as_bytes().as_ptr() as usize,
        );
        let slot = at.checked_sub(base)? / STRIDE;
        (slot < self.slots.len()).then_some(slot)
    }

    /// Attaches data to a state's tensors, so the next recording recognizes them.
    fn fix(&self, form: &Form, client: &CaptureClient) -> Result<(), String> {
        for (name, id) in &form.tensors {
            let slot = self.slot(name)?;
            let data = client.register_tensor_data(self.window(slot, self.slots[slot].dtype)?);
            client.register_alias(*id, data.id());
        }
        Ok(())
    }

    fn record(
        &self,
        learning_rate: f64,
        state: Option<&TwinState>,
        look: Look,
    ) -> Result<Recorded<O::State<D>>, String> {
        let live = match state {
            Some(state) => {
                let live = state.live.state.downcast_ref::<O::State<D>>();
                Some(
                    live.ok_or("its state belongs to another optimizer")?
                        .clone(),
                )
            }
            None => None,
        };
        let lease = Lease::take(None);
        let _ = LowBits::told();
        let recording = record_on(&lease, "the optimizer", |device, _| {
            let parameter = Tensor::<D>::empty(self.shape, (device, self.dtype));
            let gradient = Tensor::<D>::empty(self.shape, (device, self.dtype));
            let (client, first) = client_of(&parameter)?;
            let second = id_of(&gradient)?;
            let live = live.map(|state| O::to_device(state, device));
            let (after, next) = self
                .optimizer
                .step(learning_rate, parameter, gradient, live);
            let after = id_of(&after)?;
            let next = next.map(|next| {
                let form = Form::of(&next, &client, first);
                (next, form)
            });
            if let (Some((_, form)), Look::Again) = (&next, look) {
                self.fix(form, &client).map_err(Error::Internal)?;
            }
            Ok(([first, second, after], next))
        });
        let Recording {
            operations,
            values,
            result: (result, next),
        } = recording.map_err(reason_of)?;
        let recording = Recording {
            operations,
            values,
            result,
        };
        let bits = LowBits::told();
        let (form, format) = (
            next.as_ref().map(|(_, form)| form),
            bits.map(|bits| bits.format),
        );
        Ok(Recorded {
            tensors: tensors_of(&recording, form, format)?,
            recording,
            next,
            bits,
            device: lease,
        })
    }

    /// Returns the state after a step.
    fn next(
        &self,
        state: O::State<D>,
        form: &Form,
        tensors: &[Slot],
        device: Lease,
    ) -> Result<TwinState, String> {
        let mut slots = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let slot = self.slot(&tensor.name)?;
            if self.slots[slot] != *tensor {
                return Err(changed(&self.slots[slot], tensor));
            }
            slots.push(slot);
        }
        // A tensor under two names would be ambiguous.
        if form.has_aliases() {
            return self.state(&form.scalars, &slots);
        }
        Ok(TwinState {
            scalars: form.scalars.clone(),
            tensors: slots,
            live: Live {
                state: Box::new(state),
                _device: device,
            },
        })
    }

    fn structure(
        &self,
        recording: Recording<[TensorId; 3]>,
        form: Option<&Form>,
        bits: Option<LowBits>,
    ) -> Result<(Structure, Vec<Vec<ScalarIr>>), String> {
        let [parameter, gradient, after] = recording.result;
        let mut given: BTreeMap<TensorId, TensorId> =
            [(parameter, parameter_id()), (gradient, gradient_id())].into();
        for (id, data) in &recording.values {
            if let Some(slot) = self.slot_of(data) {
                given.insert(*id, state_id(slot));
            }
        }
        let mut known: Vec<TensorId> = given.keys().copied().collect();
        let mut operations = Vec::with_capacity(recording.operations.len());
        for operation in recording.operations {
            if operation
                .outputs()
                .any(|o| o.id == parameter || o.id == gradient)
            {
                continue;
            }
            if matches!(operation, OperationIr::Init(_)) {
                return Err("it creates tensors from host data".to_owned());
            }
            if let Some(input) = operation.inputs().find(|input| !known.contains(&input.id)) {
                return Err(format!(
                    "{} reads a tensor of shape {:?} that is not the parameter, its gradient or part of its state",
                    operation_name(&operation),
                    input.shape.to_vec()
                ));
            }
            known.extend(operation.outputs().map(|output| output.id));
            operations.push(operation);
        }
        let mut new_states = Vec::new();
        for (name, id) in form.map(|form| form.tensors.as_slice()).unwrap_or_default() {
            new_states.push((self.slot(name)?, *id));
        }
        new_states.sort_unstable_by_key(|(slot, _)| *slot);
        Ok(Structure::new(
            operations,
            given,
            (&self.slots, bits),
            after,
            &new_states,
        ))
    }
}

impl<O: Optimizer, const D: usize> Twin for TwinOf<O, D> {
    fn step(&self, learning_rate: f64, state: Option<&TwinState>) -> Result<TwinStep, String> {
        let Recorded {
            recording,
            next,
            tensors,
            bits,
            device,
        } = self.record(learning_rate, state, Look::Again)?;
        let form = next.as_ref().map(|(_, form)| form);
        let (structure, scalars) = self.structure(recording, form, bits)?;
        let next = match next {
            Some((next, form)) => Some(Arc::new(self.next(next, &form, &tensors, device)?)),
            None => None,
        };
        Ok(TwinStep {
            structure,
            scalars,
            next,
        })
    }

    fn state(&self, scalars: &[(String, Scalar)], tensors: &[usize]) -> Result<TwinState, String> {
        let lease = Lease::take(None);
        let names = |form: &Form| -> Vec<String> {
            let mut names: Vec<_> = form.tensors.iter().map(|(name, _)| name.clone()).collect();
            names.sort_unstable();
            names
        };
        let given = tensors
            .iter()
            .map(|slot| self.slots[*slot].name.to_string());
        let mut given: Vec<String> = given.collect();
        given.sort_unstable();
        let recording = record_on(&lease, "the optimizer", |device, _| {
            let (client, first) = client_of(&Tensor::<1>::empty([1], device))?;
            let mut source = StateSource::new(scalars.iter().cloned().collect());
            for slot in tensors {
                // A captured tensor gets the device's own type, regardless of the type of its data.
                let data = self.window(*slot, DType::F32).map_err(Error::Internal)?;
                source.insert_tensor(self.slots[*slot].name.to_string(), data);
            }
            let state = O::State::<D>::state_unflatten("", &mut source, device);
            let form = state.as_ref().map(|state| Form::of(state, &client, first));
            if let Some(form) = &form
                && names(form) == given
            {
                self.fix(form, &client).map_err(Error::Internal)?;
            }
            Ok((state, form))
        });
        let (state, form) = recording.map_err(reason_of)?.result;
        let (Some(state), Some(form)) = (state, form) else {
            return Err(format!(
                "none of its states has exactly the tensors {given:?} and the numbers {:?}",
                numbers(scalars).into_keys().collect::<Vec<_>>()
            ));
        };
        if names(&form) != given || numbers(&form.scalars) != numbers(scalars) {
            return Err(format!(
                "its state has the tensors {:?} and the numbers {:?}, not {given:?} and {:?}",
                names(&form),
                numbers(&form.scalars),
                numbers(scalars)
            ));
        }
        Ok(TwinState {
            scalars: form.scalars,
            tensors: tensors.to_vec(),
            live: Live {
                state: Box::new(state),
                _device: lease,
            },
        })
    }

    fn slots(&self) -> &Arc<Vec<Slot>> {
        &self.slots
    }
}

fn changed(known: &Slot, now: &Slot) -> String {
    format!(
        "its state \"{}\" changes from {:?} {:?} to {:?} {:?}",
        known.name, known.dtype, known.shape, now.dtype, now.shape
    )
}

fn reason_of(error: Error) -> String {
    match error {
        Error::Uncapturable { reason, .. } | Error::Internal(reason) => reason,
        other => other.to_string(),
    }
}

/// Returns the client of the recording that created a tensor, and the tensor's id there.
fn client_of<const D: usize>(tensor: &Tensor<D>) -> Result<(CaptureClient, TensorId), Error> {
    match tensor.clone().try_into_primitive::<CaptureBackend>() {
        Ok(tensor) => Ok((tensor.client.clone(), tensor.id())),
        Err(_) => Err(moved()),
    }
}

fn id_of<const D: usize>(tensor: &Tensor<D>) -> Result<TensorId, Error> {
    float_id(tensor)
        .map(|captured| captured.id)
        .ok_or_else(moved)
}

fn moved() -> Error {
    Error::Internal("it moves tensors to another device".to_owned())
}
