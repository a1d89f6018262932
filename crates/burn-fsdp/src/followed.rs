//! Optimizers that go on from states of every type.
//!
//! Burn puts the state of an optimizer together from a record in the default type of the device: a moment of bf16, f16 or
//! f64 comes back in f32, and the next step panics. There is no other way into a `ModuleOptimizer`. So such a state stays
//! here, in its type, and a copy of the optimizer steps beside it on a device that records: it counts and branches on
//! the host as it always does, and its operations run on the tensors that are here. They are the operations that Burn
//! would run, in their order, so that the numbers are the same bits.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use burn::backend::Flex;
use burn::module::{Param, ParamGroup};
use burn::optim::{
    DynOptimizer, DynState, ModuleOptimizer, OptimizerRecord, StateSink, StateSource,
};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Bytes, DType, Device, Shape, Tensor, TensorData};
use burn_fsdp_shard::Probe;
use burn_ir::{HandleKind, TensorId, TensorIr, TensorStatus};
use burn_pack::{Scalar, Tensor as PackedTensor};
use burn_router::TensorInterpreter;

use crate::optimizer_record::{OptimizerParts, RANK_KEY, packed};
use crate::recorded::{Kind, Outline, Place, Recorded, Slot, segments, stepped, with_rank};
use crate::step_before::outline_of;

/// What becomes of the elements of a state that is put together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Elements {
    Copied,
    /// It is only tried.
    LeftOut,
}

/// Returns the group of one parameter.
pub(crate) fn group_of<const D: usize>(place: &Place) -> ParamGroup {
    let none = Tensor::<D>::zeros([1; D], &Device::flex());
    ParamGroup::ids_from_module(Probe::new(
        segments(place),
        Param::initialized(place.id, none),
    ))
}

thread_local! {
    /// Whether the optimizer that is followed is asked for.
    static ORIGINAL: RefCell<Asked> = const { RefCell::new(Asked::No) };
}

/// The question for the optimizer that is followed: Burn shows nothing of a `ModuleOptimizer`'s groups, but loads states by
/// them.
enum Asked {
    No,
    Yes,
    Answered(Box<ModuleOptimizer>),
}

/// Returns an optimizer without state, and without what has been put around it to follow these parameters before.
pub(crate) fn as_configured(optimizer: &ModuleOptimizer, ids: &BTreeSet<u64>) -> ModuleOptimizer {
    let ranks = ids.iter().map(|id| format!("{id}.{RANK_KEY}"));
    let ranks = ranks.map(|name| (name, Scalar::from(1_usize)));
    let question = packed(Vec::new(), ranks.collect(), &BTreeMap::new()).ok();
    let question = question.and_then(|bytes| OptimizerRecord::from_bytes(bytes).ok());
    ORIGINAL.set(Asked::Yes);
    drop(optimizer.clone().load_record(question.unwrap_or_default()));
    match ORIGINAL.replace(Asked::No) {
        Asked::Answered(original) => *original,
        Asked::No | Asked::Yes => optimizer.clone().load_record(OptimizerRecord::default()),
    }
}

/// The optimizer of one parameter, whose state is of another type than Burn would make it.
pub(crate) struct Followed {
    /// As it was configured, without state.
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) place: Place,
    /// The names of the tensors of its state, and of the numbers.
    pub(crate) fields: Vec<String>,
    pub(crate) numbers: Vec<String>,
    /// The state that the record which is loaded first has, put together before.
    pub(crate) first: Mutex<Option<DynState>>,
}

/// The state of one parameter.
#[derive(Clone)]
pub(crate) struct State<const D: usize> {
    outline: Outline,
    /// The tensors, by slot of the outline; all on the host.
    tensors: Vec<Tensor<D>>,
}

impl<const D: usize> State<D> {
    /// Puts a state together.
    pub(crate) fn of(
        (optimizer, place): (&ModuleOptimizer, &Place),
        scalars: Vec<(String, Scalar)>,
        packed: &[(String, &PackedTensor)],
        elements: Elements,
    ) -> Result<DynState, String> {
        let mut tensors = Vec::with_capacity(packed.len());
        let mut slots = Vec::with_capacity(packed.len());
        for (field, tensor) in packed {
            let shape = tensor.shape.to_vec();
            if shape.len() != D {
                return Err(format!(
                    "`{field}` is of {} dims, and not of {D}",
                    shape.len()
                ));
            }
            if elements == Elements::Copied {
                let bytes = tensor.to_bytes().map_err(|error| error.to_string())?;
                tensors.push(tensor_of(&bytes, &shape, tensor.dtype));
            }
            let (field, dtype) = (field.clone(), tensor.dtype);
            slots.push(Slot {
                field,
                shape,
                dtype,
            });
        }
        let outline = outline_of::<D>(optimizer, place, &scalars, &slots)?;
        Ok(DynState::create(Self { outline, tensors }, D))
    }

    /// Makes the recorded operations of a step, and returns the new parameter and the new state.
    fn run(
        self,
        recorded: Recorded,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
    ) -> Result<(Tensor<D>, Self), String> {
        let dtype = parameter.dtype();
        let shape = parameter.shape();
        let mut interpreter = TensorInterpreter::<Flex>::new(Default::default());
        let slots = recorded.given.iter();
        let states = slots.map(|(id, slot)| (*id, self.tensors[*slot].clone()));
        let given = [
            (recorded.parameter, parameter),
            (recorded.gradient, gradient),
        ];
        for (id, tensor) in given.into_iter().chain(states) {
            let primitive = tensor.try_into_primitive::<Flex>();
            let primitive = primitive.map_err(|_| "it is not on the host any more".to_owned())?;
            interpreter.register_tensor_to_device(id, HandleKind::Float(primitive));
        }
        for (id, data) in recorded.constants {
            interpreter.register_tensor_data_id(id, data);
        }
        // The state before makes room where operations work in place.
        drop(self.tensors);
        for operation in recorded.operations {
            interpreter.register_op(operation);
        }
        let mut read = |id: TensorId, shape: Shape, dtype: DType| {
            let status = TensorStatus::ReadOnly;
            let kept = interpreter.get_tensor(&TensorIr {
                id,
                shape,
                status,
                dtype,
            });
            match kept {
                HandleKind::Float(tensor) => Ok(Tensor::<D>::from_primitive::<Flex>(tensor)),
                _ => Err("its state is of integers after a step".to_owned()),
            }
        };
        let parameter = read(recorded.updated, shape, dtype)?;
        let mut tensors = Vec::with_capacity(recorded.states.len());
        for (id, slot) in recorded.states.iter().zip(&recorded.outline.slots) {
            let tensor = read(*id, Shape::from(slot.shape.clone()), slot.dtype)?;
            if tensor.dtype() != slot.dtype || tensor.shape().to_vec() != slot.shape {
                return Err(format!(
                    "`{}` is of another shape or type after a step",
                    slot.field
                ));
            }
            tensors.push(tensor);
        }
        let outline = recorded.outline;
        Ok((parameter, Self { outline, tensors }))
    }
}

/// Returns a tensor on the host.
fn tensor_of<const D: usize>(bytes: &Bytes, shape: &[usize], dtype: DType) -> Tensor<D> {
    let options = (&Device::flex(), dtype);
    match bytes.is_empty() {
        // Nothing has no address that kernels take.
        true => Tensor::zeros(Shape::from(shape.to_vec()), options),
        false => {
            let data = TensorData::from_bytes_vec(bytes.to_vec(), shape.to_vec(), dtype);
            Tensor::from_data(data, options)
        }
    }
}

impl Followed {
    /// Makes the first step of a parameter, as Burn does, and takes the state over.
    fn first_step<const D: usize>(
        &self,
        learning_rate: f64,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
    ) -> Result<(Tensor<D>, Option<DynState>), String> {
        let optimizer = self.optimizer.clone();
        let (optimizer, parameter) =
            stepped(optimizer, &self.place, learning_rate, parameter, gradient);
        let parts = OptimizerParts::take(&optimizer).map_err(|error| error.to_string())?;
        let id = self.place.id.val();
        let tensors: Vec<_> = parts.tensors_of(id).collect();
        let scalars: Vec<_> = parts
            .scalars_of(id)
            .filter(|(field, _)| field != RANK_KEY)
            .collect();
        if tensors.is_empty() && scalars.is_empty() {
            return Ok((parameter, None));
        }
        let of = (&self.optimizer, &self.place);
        let state = State::<D>::of(of, scalars, &tensors, Elements::Copied)?;
        Ok((parameter, Some(state)))
    }

    fn step<const D: usize>(
        &self,
        learning_rate: f64,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<DynState>,
    ) -> Result<(Tensor<D>, Option<DynState>), String> {
        let Some(state) = state else {
            return self.first_step(learning_rate, parameter, gradient);
        };
        let state = state.downcast::<State<D>>();
        let kind = Kind::<D> {
            shape: parameter.dims(),
            dtype: parameter.dtype(),
            gradient: gradient.dtype(),
        };
        let recorded = state.outline.record(&self.place, learning_rate, kind)?;
        let (parameter, state) = state.run(recorded, parameter, gradient)?;
        Ok((parameter, Some(DynState::create(state, D))))
    }

    /// Puts a state together from a record that is loaded later.
    fn state_from<const D: usize>(
        &self,
        prefix: &str,
        source: &mut StateSource,
    ) -> Option<DynState> {
        let id = Some(self.place.id.val());
        let tensors = self.fields.iter().map(|field| {
            let (bytes, shape, dtype) = source.take_tensor(prefix, field)?.into_parts();
            Some(PackedTensor::new(field.clone(), dtype, shape, id, bytes))
        });
        let tensors: Vec<_> = tensors.collect::<Option<_>>()?;
        let scalars = self.numbers.iter().map(|field| {
            let scalar = source.take_scalar(prefix, field)?;
            Some((field.clone(), scalar))
        });
        let scalars = scalars.collect::<Option<_>>()?;
        let tensors: Vec<_> = tensors
            .iter()
            .map(|tensor| (tensor.name.clone(), tensor))
            .collect();
        let of = (&self.optimizer, &self.place);
        State::<D>::of(of, scalars, &tensors, Elements::Copied).ok()
    }

    /// Answers the question for the optimizer, if it is asked.
    fn answer(&self) -> bool {
        let is_asked = ORIGINAL.with_borrow(|asked| !matches!(asked, Asked::No));
        if is_asked {
            ORIGINAL.set(Asked::Answered(Box::new(self.optimizer.clone())));
        }
        is_asked
    }
}

/// More dims than tensors have whose states are followed.
const NO_DIMS: &str = "a state of 1 to 6 dims was put together, and has others now";

impl DynOptimizer for Followed {
    fn step_dyn(
        &self,
        rank: usize,
        learning_rate: f64,
        parameter: BridgeTensor,
        gradient: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        with_rank!(
            rank,
            D => {
                let of = (Tensor::<D>::from_bridge(parameter), Tensor::<D>::from_bridge(gradient));
                let stepped = self.step(learning_rate, of.0, of.1, state);
                // Burn's steps return no errors. What was saved is whole.
                let (parameter, state) = stepped.unwrap_or_else(|reason| {
                    let path = self.place.path.as_deref().unwrap_or_default();
                    panic!("the optimizer of `{path}`, which goes on from a state of another type: {reason}")
                });
                (parameter.into_bridge(), state)
            },
            panic!("{NO_DIMS}")
        )
    }

    fn to_device_dyn(&self, state: DynState, _device: &Device) -> DynState {
        // It stays on the host, as its parameter does: a step looks.
        state
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        with_rank!(
            state.rank(),
            D => {
                let state = state.downcast_ref::<State<D>>();
                for (slot, tensor) in state.outline.slots.iter().zip(&state.tensors) {
                    out.push_tensor(prefix, &slot.field, tensor.clone().into_data());
                }
                for (field, scalar) in &state.outline.scalars {
                    out.push_scalar(prefix, field, *scalar);
                }
            },
            panic!("{NO_DIMS}")
        );
    }

    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        _device: &Device,
    ) -> Option<DynState> {
        if self.answer() {
            return None;
        }
        let first = self
            .first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        first.or_else(|| with_rank!(rank, D => self.state_from::<D>(prefix, source), None))
    }
}
