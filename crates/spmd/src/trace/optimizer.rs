//! A Burn optimizer's step as operations, and the host scalars in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use burn::optim::{Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_ir::{OperationIr, ScalarIr, TensorId};
use burn_pack::Scalar;

use super::capture::{Captured, float_id, record};
use crate::Error;
use crate::graph::{Node, Phase, operation_name};

/// Which step of an optimizer: the first has no state yet, and other operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OptimizerStep {
    /// Without a state.
    First,
    /// With the state of the step before.
    Next,
}

/// One step of an optimizer for a parameter of one shape.
#[derive(Debug, Clone)]
pub(super) struct Template {
    pub(super) operations: Vec<OperationIr>,
    pub(super) parameter: TensorId,
    pub(super) gradient: TensorId,
    pub(super) new_parameter: TensorId,
    /// Empty in the first step.
    pub(super) states: Vec<TensorId>,
    pub(super) new_states: Vec<Captured>,
}

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

/// Traces a step for a parameter of that shape.
pub(super) fn template<O: Optimizer>(
    optimizer: &O,
    step: OptimizerStep,
    learning_rate: f64,
    path: &str,
    shape: &[usize],
    dtype: DType,
) -> Result<Template, Error> {
    with_rank!(
        shape.len(),
        D => template_of_rank::<O, D>(optimizer, step, learning_rate, path, shape, dtype),
        Err(too_many_dims(path, shape.len()))
    )
}

fn too_many_dims(path: &str, rank: usize) -> Error {
    Error::UntraceableOptimizer {
        path: path.to_owned(),
        reason: format!("its tensor has {rank} dims, and 1 to 6 are supported"),
    }
}

fn template_of_rank<O: Optimizer, const D: usize>(
    optimizer: &O,
    step: OptimizerStep,
    learning_rate: f64,
    path: &str,
    shape: &[usize],
    dtype: DType,
) -> Result<Template, Error> {
    // Some optimizers take more than one step to settle: the third must look like the fourth.
    const STEPS: usize = 4;
    let recording = record("the optimizer", |device, _| {
        let mut shape_of = [0; D];
        shape_of.copy_from_slice(shape);
        let empty = || Tensor::<D>::empty(shape_of, (device, dtype));
        let mut parameter = empty();
        let mut state = None;
        let mut marks = Vec::new();
        for _ in 0..STEPS {
            let gradient = empty();
            let before = id_of(&parameter)?;
            let mark = id_of(&gradient)?;
            let (after, next) = optimizer.step(learning_rate, parameter, gradient, state);
            marks.push((before.id, mark.id, id_of(&after)?.id));
            (parameter, state) = (after, next);
        }
        Ok(marks)
    })?;
    let marks = recording.result;
    let starts: Vec<usize> = marks
        .iter()
        .filter_map(|(_, gradient, _)| {
            let writes = |op: &OperationIr| op.outputs().any(|output| output.id == *gradient);
            recording.operations.iter().position(writes)
        })
        .chain([recording.operations.len()])
        .collect();
    let constants = !recording.values.is_empty();
    if starts.len() != STEPS + 1 || constants {
        return Err(Error::UntraceableOptimizer {
            path: path.to_owned(),
            reason: "it makes tensors of host data".to_owned(),
        });
    }
    let segment =
        |index: usize| recording.operations[starts[index] + 1..starts[index + 1]].to_vec();
    let reads = |index: usize| {
        let (parameter, gradient, _) = marks[index];
        read_from_outside(&segment(index), &[parameter, gradient])
    };
    let index = match step {
        OptimizerStep::First => 0,
        OptimizerStep::Next => 2,
    };
    let names =
        |index: usize| -> Vec<String> { segment(index).iter().map(operation_name).collect() };
    if names(2) != names(3) || reads(2).len() != reads(3).len() || reads(1).len() != reads(2).len()
    {
        return Err(Error::UntraceableOptimizer {
            path: path.to_owned(),
            reason: "its third and fourth step differ in their operations".to_owned(),
        });
    }
    let (parameter, gradient, new_parameter) = marks[index];
    Ok(Template {
        operations: segment(index),
        parameter,
        gradient,
        new_parameter,
        states: match step {
            OptimizerStep::First => Vec::new(),
            OptimizerStep::Next => reads(index).into_iter().map(|state| state.id).collect(),
        },
        new_states: reads(index + 1),
    })
}

fn id_of<const D: usize>(tensor: &Tensor<D>) -> Result<Captured, Error> {
    float_id(tensor).ok_or_else(|| Error::UntraceableOptimizer {
        path: String::new(),
        reason: "it moves tensors to another device".to_owned(),
    })
}

/// What operations read but do not write, in the order of first use.
fn read_from_outside(operations: &[OperationIr], given: &[TensorId]) -> Vec<Captured> {
    let mut known: BTreeSet<TensorId> = given.iter().copied().collect();
    let mut found = Vec::new();
    for operation in operations {
        for input in operation.inputs() {
            if known.insert(input.id) {
                found.push(Captured {
                    id: input.id,
                    shape: input.shape.to_vec(),
                    dtype: input.dtype,
                });
            }
        }
        known.extend(operation.outputs().map(|output| output.id));
    }
    found
}

/// The host scalars of an optimizer's steps.
///
/// The optimizer runs beside the graph on tensors of one element, once for each rank of tensors that
/// parameters have: that keeps its step counter. Each step's scalars are read off a trace of that.
pub struct HostScalars {
    twins: BTreeMap<usize, Box<dyn Twin>>,
}

/// The scalars of one step, by rank of the parameter's tensor and position of the operation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepScalars {
    /// Names of the operations, to compare with a graph's.
    names: BTreeMap<usize, Vec<String>>,
    values: BTreeMap<usize, Vec<Vec<ScalarIr>>>,
}

impl StepScalars {
    /// The scalars of an operation, if there is one at that place.
    pub fn get(&self, rank: usize, position: usize) -> Option<&[ScalarIr]> {
        Some(self.values.get(&rank)?.get(position)?)
    }

    /// What the operations of the step are, without their scalars: an optimizer may leave operations
    /// out when a scalar is zero, and then the step needs another graph.
    pub fn structure(&self) -> &BTreeMap<usize, Vec<String>> {
        &self.names
    }
}

impl HostScalars {
    /// Before the first step, for parameters whose tensors have these ranks.
    ///
    /// # Errors
    ///
    /// [`Error::UntraceableOptimizer`] for a rank above 6.
    pub fn new<O: Optimizer>(
        optimizer: &O,
        ranks: impl IntoIterator<Item = usize>,
    ) -> Result<Self, Error> {
        let mut twins: BTreeMap<usize, Box<dyn Twin>> = BTreeMap::new();
        for rank in ranks {
            let twin: Box<dyn Twin> = with_rank!(
                rank,
                D => Box::new(TwinOf::<O, D> { optimizer: optimizer.clone(), state: None }),
                return Err(too_many_dims("", rank))
            );
            twins.insert(rank, twin);
        }
        Ok(Self { twins })
    }

    /// The scalars of the next step at that learning rate.
    ///
    /// # Errors
    ///
    /// [`Error::Uncapturable`] if the optimizer reads tensors.
    pub fn peek(&self, learning_rate: f64) -> Result<StepScalars, Error> {
        let mut scalars = StepScalars::default();
        for (rank, twin) in &self.twins {
            let operations = twin.trace(learning_rate)?;
            let nodes = operations
                .into_iter()
                .map(|op| Node::new(op, Phase::Optimizer));
            let (names, values) = nodes
                .map(|node| (node.name(), node.scalar_values()))
                .unzip();
            scalars.names.insert(*rank, names);
            scalars.values.insert(*rank, values);
        }
        Ok(scalars)
    }

    /// Counts the step as done.
    pub fn advance(&mut self, learning_rate: f64) {
        for twin in self.twins.values_mut() {
            twin.advance(learning_rate);
        }
    }

    /// The host values of the optimizer's state, such as its step counter, as named numbers; equal
    /// for all parameters. Empty before the first step.
    pub fn counters(&self) -> Vec<(String, Scalar)> {
        let first = self.twins.values().next();
        first.map(|twin| twin.counters()).unwrap_or_default()
    }

    /// Gives the optimizer's state these numbers; none is the state before the first step.
    ///
    /// # Errors
    ///
    /// [`Error::UntraceableOptimizer`] if it has others.
    pub fn set_counters(&mut self, counters: &[(String, Scalar)]) -> Result<(), Error> {
        for twin in self.twins.values_mut() {
            twin.set_counters(counters)?;
        }
        Ok(())
    }
}

impl fmt::Debug for HostScalars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostScalars")
            .field("ranks", &self.twins.keys())
            .field("counters", &self.counters())
            .finish()
    }
}

trait Twin: Send {
    fn trace(&self, learning_rate: f64) -> Result<Vec<OperationIr>, Error>;
    fn advance(&mut self, learning_rate: f64);
    fn counters(&self) -> Vec<(String, Scalar)>;
    fn set_counters(&mut self, counters: &[(String, Scalar)]) -> Result<(), Error>;
}

struct TwinOf<O: Optimizer, const D: usize> {
    optimizer: O,
    state: Option<O::State<D>>,
}

impl<O: Optimizer, const D: usize> Twin for TwinOf<O, D> {
    fn trace(&self, learning_rate: f64) -> Result<Vec<OperationIr>, Error> {
        let recording = record("the optimizer", |device, _| {
            let state = self.state.clone().map(|state| O::to_device(state, device));
            let parameter = Tensor::<D>::empty([1; D], device);
            let gradient = Tensor::<D>::empty([1; D], device);
            let mark = id_of(&gradient)?.id;
            let _ = self
                .optimizer
                .step(learning_rate, parameter, gradient, state);
            Ok(mark)
        })?;
        let mut operations = recording.operations;
        let writes = |op: &OperationIr| op.outputs().any(|o| o.id == recording.result);
        let start = operations
            .iter()
            .position(writes)
            .map_or(0, |mark| mark + 1);
        Ok(operations.split_off(start))
    }

    fn advance(&mut self, learning_rate: f64) {
        let device = Device::flex();
        let ones = || Tensor::<D>::ones([1; D], &device);
        let state = self.state.take();
        self.state = self.optimizer.step(learning_rate, ones(), ones(), state).1;
    }

    fn counters(&self) -> Vec<(String, Scalar)> {
        let mut sink = StateSink::default();
        if let Some(state) = &self.state {
            state.state_flatten("", &mut sink);
        }
        sink.scalars
    }

    fn set_counters(&mut self, counters: &[(String, Scalar)]) -> Result<(), Error> {
        self.state = None;
        if counters.is_empty() {
            return Ok(());
        }
        // A state of the right form, for its numbers to be replaced. At a rate that is not zero, so that
        // nothing is left out.
        self.advance(1.0);
        let mut sink = StateSink::default();
        if let Some(state) = &self.state {
            state.state_flatten("", &mut sink);
        }
        let names = |of: &[(String, Scalar)]| -> BTreeSet<String> {
            of.iter().map(|(name, _)| name.clone()).collect()
        };
        let (own, given) = (names(&sink.scalars), names(counters));
        if own != given {
            return Err(Error::UntraceableOptimizer {
                path: String::new(),
                reason: format!("its state has the numbers {own:?}, not {given:?}"),
            });
        }
        let mut source = StateSource::new(counters.iter().cloned().collect());
        for (name, data) in sink.tensors {
            source.insert_tensor(name, data);
        }
        self.state = O::State::<D>::state_unflatten("", &mut source, &Device::flex());
        Ok(())
    }
}

/// The names of an optimizer's states, in the order in which its operations first read them.
///
/// # Errors
///
/// [`Error::Uncapturable`] if the optimizer reads tensors.
pub(super) fn slot_names<O: Optimizer>(
    optimizer: &O,
    learning_rate: f64,
) -> Result<Vec<Arc<str>>, Error> {
    let device = Device::flex();
    let ones = || Tensor::<1>::ones([1], &device);
    let mut state = None;
    for _ in 0..2 {
        state = optimizer.step(learning_rate, ones(), ones(), state).1;
    }
    let Some(state) = state else {
        return Ok(Vec::new());
    };
    let mut sink = StateSink::default();
    state.state_flatten("", &mut sink);
    // States of distinct values, so that the trace tells which is which.
    let names: Vec<Arc<str>> = sink
        .tensors
        .iter()
        .map(|(name, _)| name.as_str().into())
        .collect();
    let marked = |index: usize| TensorData::new(vec![index as f32 + 0.5], [1]);
    let recording = record("the optimizer", |device, _| {
        let mut source = StateSource::new(sink.scalars.iter().cloned().collect());
        for (index, name) in names.iter().enumerate() {
            source.insert_tensor(name.to_string(), marked(index));
        }
        let state = O::State::<1>::state_unflatten("", &mut source, device);
        let parameter = Tensor::<1>::empty([1], device);
        let gradient = Tensor::<1>::empty([1], device);
        let known = [id_of(&parameter)?.id, id_of(&gradient)?.id];
        let _ = optimizer.step(learning_rate, parameter, gradient, state);
        Ok(known)
    })?;
    let is_init = |op: &&OperationIr| !matches!(op, OperationIr::Init(_));
    let operations: Vec<_> = recording
        .operations
        .iter()
        .filter(is_init)
        .cloned()
        .collect();
    let read = read_from_outside(&operations, &recording.result);
    let name_of = |state: Captured| {
        let data = recording.values.iter().find(|(id, _)| *id == state.id)?;
        let index = (0..names.len()).find(|index| data.1 == marked(*index))?;
        Some(names[index].clone())
    };
    Ok(read.into_iter().filter_map(name_of).collect())
}
