//! The executor: one rank's tensors, and the run of a graph's nodes over them.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{DType, TensorData};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_tensors::Staged;
use burn_ir::{
    BackendIr, BaseOperationIr, CustomOpIr, HandleKind, OperationIr, ScalarIr, TensorId, TensorIr,
    TensorStatus,
};
use burn_router::TensorInterpreter;

use super::collective::{self, Along, Failure, Flights};
use super::failed::failed;
use super::memory::{Address, MemoryTable};
use super::random::{Drawing, Moment};
use super::sealed::Seals;
use super::timeline::Timeline;
use crate::custom::CustomOperations;
use crate::error::Error;
use crate::graph::{Absent, AxisShift, Draw, Graph, Node, Stage};
use crate::kernels::kernels_of;
use crate::low_bit::with_states;
use crate::norm::with_norms;
use crate::panics::message;
use crate::ranks::DATA_AXIS;
use crate::trace::StepScalars;

/// The results of a run of a graph.
#[derive(Debug, Clone)]
pub struct Results<T = TensorData> {
    /// The loss, one number; `None` if the graph has none.
    pub loss: Option<TensorData>,
    /// The other outputs, by name.
    pub outputs: BTreeMap<Arc<str>, T>,
}

/// The executor of one rank: holds its tensors and runs graphs over them.
///
/// Parameters, buffers and states stay in it from step to step, under the ids that they have in the graph. A run that
/// fails at a node leaves them in an undefined state.
pub struct Executor<B: BackendIr> {
    pub(super) interpreter: TensorInterpreter<B>,
    pub(super) group: ProcessGroup,
    /// The group of ranks along each mesh axis.
    axes: BTreeMap<Arc<str>, ProcessGroup>,
    pub(super) table: MemoryTable,
    pub(super) flights: Flights,
    /// Shapes and types of the given values that are set.
    pub(super) present: BTreeMap<TensorId, (Vec<usize>, DType)>,
    /// The values of the running graph that this rank lacks because another rank owns them.
    pub(super) absent: Absent,
    constants: Vec<TensorId>,
    operations: CustomOperations<B>,
    pub(super) seals: Seals,
    /// The step and micro-batch for which random numbers are drawn from a seed.
    moment: Moment,
    /// The scalars of the previous step, if nodes were moved from there into this one.
    pub(super) before: Option<StepScalars>,
}

impl<B: BackendIr> Executor<B> {
    /// Creates an executor without tensors.
    pub fn new(device: B::Device, group: ProcessGroup) -> Self {
        Self {
            interpreter: TensorInterpreter::new(device),
            axes: [(Arc::from(DATA_AXIS), group.clone())].into(),
            seals: Seals::new(&group),
            group,
            table: MemoryTable::default(),
            flights: Flights::default(),
            present: BTreeMap::new(),
            absent: Absent::default(),
            constants: Vec::new(),
            operations: with_states(with_norms(kernels_of())),
            moment: Moment::default(),
            before: None,
        }
    }

    /// Sets the group of ranks along each mesh axis. By default, all ranks are along the axis `data`.
    #[must_use]
    pub fn axes(mut self, axes: impl IntoIterator<Item = (Arc<str>, ProcessGroup)>) -> Self {
        self.axes = axes.into_iter().collect();
        self
    }

    /// Sets the operations that graphs may use in addition to Burn's, replacing the operations set before.
    pub fn set_operations(&mut self, operations: CustomOperations<B>) {
        self.operations = with_states(with_norms(kernels_of().and(operations)));
    }

    /// Returns the operations that graphs may use in addition to Burn's.
    pub fn operations(&self) -> &CustomOperations<B> {
        &self.operations
    }

    /// Sets the step and the micro-batch for which later runs draw random numbers from a seed
    /// ([`Mode::seeded`](crate::Mode::seeded)). Without this call, all runs draw the same numbers. All ranks must set
    /// the same values.
    pub fn draw_for(&mut self, step: u64, micro: u32) {
        self.moment = Moment { step, micro };
    }

    /// Returns the device on which graphs run.
    pub fn device(&self) -> B::Device {
        self.interpreter.device()
    }

    /// Returns the group of ranks that run graphs together.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the table of live tensor memory.
    pub fn table(&self) -> &MemoryTable {
        &self.table
    }

    /// Returns the copies that collectives have made between the host and a device with its own memory.
    pub fn staged(&self) -> Staged {
        self.flights.staging.staged()
    }

    /// Returns the mutable memory table, to start a measurement.
    pub fn table_mut(&mut self) -> &mut MemoryTable {
        &mut self.table
    }

    /// Makes the constants of a graph available, and frees the constants of the previous graph.
    pub fn load_constants(&mut self, graph: &Graph) {
        for id in std::mem::take(&mut self.constants) {
            self.remove(id);
        }
        for (id, data) in graph.constants() {
            self.set(*id, data.as_ref().clone());
            self.constants.push(*id);
        }
    }

    /// Runs a graph once and returns its results. Every given value that its nodes read must be set; inputs are freed
    /// afterwards. All ranks of the group must call it, with equal graphs.
    ///
    /// # Errors
    ///
    /// Before anything runs: [`Error::GroupSize`]; [`Error::Missing`] or [`Error::TensorMismatch`] for a value. From a
    /// node: [`Error::Execution`] or [`Error::Collective`].
    pub fn run(
        &mut self,
        graph: &Graph,
        scalars: &StepScalars,
        timeline: Option<&mut Timeline>,
    ) -> Result<Results, Error> {
        self.run_for(graph, scalars, timeline, |executor, output| {
            executor.read_tensor(output)
        })
    }

    /// Runs a graph once, as [`run`](Self::run) does, and returns its outputs in the memory of the executor's device.
    pub(crate) fn run_on_device(
        &mut self,
        graph: &Graph,
        scalars: &StepScalars,
    ) -> Result<Results<HandleKind<B>>, Error> {
        self.run_for(graph, scalars, None, |executor, output| {
            Ok(executor.interpreter.get_tensor(output))
        })
    }

    /// Runs a graph once, and `take`s each of its outputs.
    fn run_for<T>(
        &mut self,
        graph: &Graph,
        scalars: &StepScalars,
        mut timeline: Option<&mut Timeline>,
        mut take: impl FnMut(&mut Self, &TensorIr) -> Result<T, Error>,
    ) -> Result<Results<T>, Error> {
        self.execute(graph, scalars, &mut timeline)?;
        let loss = graph.loss().map(|id| graph.read(id)).transpose()?;
        let loss = loss.map(|loss| self.read_tensor(&loss)).transpose()?;
        let mut outputs = BTreeMap::new();
        for (name, id) in graph.outputs() {
            outputs.insert(name.clone(), take(self, &graph.read(*id)?)?);
        }
        self.look_at_left(graph)?;
        self.finish(graph);
        self.seal_left(graph);
        Ok(Results { loss, outputs })
    }

    fn execute(
        &mut self,
        graph: &Graph,
        scalars: &StepScalars,
        timeline: &mut Option<&mut Timeline>,
    ) -> Result<(), Error> {
        self.absent = graph.absent_on(self.group.rank())?;
        self.check(graph)?;
        self.seal_given(graph)?;
        self.await_written(graph);
        for (index, node) in graph.nodes().iter().enumerate() {
            if self.absent.skips(node) {
                self.skip(node);
                continue;
            }
            let start = timeline.is_some().then(Instant::now);
            let carried = self.look_at_taken(index, node)?;
            self.run_node(index, node, scalars)?;
            self.keep_seals(node, carried);
            self.seal_written(node);
            if let (Some(timeline), Some(start)) = (timeline.as_deref_mut(), start)
                && !node.is_drop()
            {
                timeline.record(index, node, start, self.table.live_bytes());
            }
        }
        Ok(())
    }

    fn check(&self, graph: &Graph) -> Result<(), Error> {
        if graph.num_ranks() != self.group.size() {
            return Err(Error::GroupSize {
                expected: graph.num_ranks(),
                got: self.group.size(),
            });
        }
        for node in graph.nodes() {
            for input in node.inputs() {
                let value = graph.value(input);
                let Some(value) = value.filter(|of| of.role.is_given()) else {
                    continue;
                };
                if self.absent.contains(input) {
                    continue;
                }
                let Some((shape, dtype)) = self.present.get(&input) else {
                    return Err(Error::Missing {
                        what: value.role.to_string(),
                    });
                };
                if (shape, *dtype) != (&value.shape, value.dtype) {
                    return Err(Error::TensorMismatch {
                        what: "value",
                        name: value.role.to_string(),
                        expected: format!("{:?} {:?}", value.dtype, value.shape),
                        got: format!("{dtype:?} {shape:?}"),
                    });
                }
            }
        }
        Ok(())
    }

    fn run_node(&mut self, index: usize, node: &Node, scalars: &StepScalars) -> Result<(), Error> {
        if node.collective.is_some() {
            self.run_collective(index, node)?;
        } else if let OperationIr::Custom(call) = &node.operation {
            if node.scalars.is_empty() {
                self.run_custom(index, node, call)?
            } else {
                let operation = node.operation.clone();
                if let OperationIr::Custom(call) = self.patched(index, node, operation, scalars)? {
                    self.run_custom(index, node, &call)?;
                }
            }
        } else if let Some(draw) = &node.draw {
            catch_unwind(AssertUnwindSafe(|| self.draw(node, draw)))
                .unwrap_or_else(|payload| Err(message(payload.as_ref())))
                .map_err(|reason| failed(index, node, reason))?;
        } else {
            let mut operation = node.operation.clone();
            if let Some(shift) = &node.shift {
                self.shift(&mut operation, shift)
                    .map_err(|reason| failed(index, node, reason))?;
            }
            if !node.scalars.is_empty() {
                operation = self.patched(index, node, operation, scalars)?;
            }
            let run = catch_unwind(AssertUnwindSafe(|| self.interpreter.register_op(operation)));
            run.map_err(|payload| failed(index, node, message(payload.as_ref())))?;
        }
        let outputs = node.operation.outputs();
        let outputs = outputs.filter(|output| !self.absent.contains(output.id));
        let outputs = outputs.collect::<Vec<&TensorIr>>().into_iter();
        let stage = node.collective.as_ref().map(|collective| collective.stage);
        let written: Vec<_> = match stage {
            Some(Stage::Start) => outputs
                .map(|output| (output.id, Address::reserved(output)))
                .collect(),
            _ => outputs
                .filter_map(|output| Some((output.id, self.address(output)?)))
                .collect(),
        };
        let taken = |input: &&TensorIr| input.status == TensorStatus::ReadWrite;
        let freed = node.operation.inputs().filter(taken).map(|input| input.id);
        match stage {
            // The results were counted when their memory was reserved.
            Some(Stage::Wait) => self.table.replace(&written, freed),
            _ => self.table.write(&written, freed, index),
        }
        Ok(())
    }

    fn along(&self, axis: &str) -> Result<&ProcessGroup, String> {
        let group = self.axes.get(axis);
        group.ok_or_else(|| format!("there is no mesh axis \"{axis}\""))
    }

    /// Moves a slice from the ranges of the first rank of an axis to the ranges of this rank.
    fn shift(&self, operation: &mut OperationIr, shift: &AxisShift) -> Result<(), String> {
        let (OperationIr::BaseFloat(BaseOperationIr::Slice(op))
        | OperationIr::BaseInt(BaseOperationIr::Slice(op))
        | OperationIr::BaseBool(BaseOperationIr::Slice(op))) = operation
        else {
            return Err("only slices can depend on the rank".to_owned());
        };
        let start = self.along(&shift.axis)?.rank() * shift.len;
        if let Some(range) = op.ranges.get_mut(shift.dim) {
            range.start = start as isize;
            range.end = Some((start + shift.len) as isize);
        }
        Ok(())
    }

    /// Draws this rank's part of random numbers from a seed.
    fn draw(&mut self, node: &Node, draw: &Draw) -> Result<(), String> {
        let moment = self.moment;
        let along = |axis: &str| Ok(self.along(axis)?.rank());
        let drawing = Drawing::new(draw, moment, self.group.rank(), along)?;
        let data = drawing.of(&node.operation)?;
        if let Some(output) = node.outputs().next() {
            self.interpreter.register_tensor_data_id(output, data);
        }
        Ok(())
    }

    /// Runs a custom operation.
    fn run_custom(&mut self, index: usize, node: &Node, call: &CustomOpIr) -> Result<(), Error> {
        let Some(mut own) = self.own_call(call)? else {
            return Ok(());
        };
        if let Some(shift) = &node.shift {
            let group = self.along(&shift.axis);
            let group = group.map_err(|reason| failed(index, node, reason))?;
            let start = group.rank() * shift.len;
            own.scalars.push(ScalarIr::UInt(start as u64));
        }
        let call = &own;
        let operation = self.operations.get(call)?;
        let tensors = call.inputs.iter();
        let inputs = tensors.map(|input| self.interpreter.get_tensor(input));
        let inputs = inputs.collect();
        let results = catch_unwind(AssertUnwindSafe(|| operation.run(call, inputs)))
            .unwrap_or_else(|payload| Err(message(payload.as_ref())))
            .map_err(|reason| failed(index, node, reason))?;
        if results.len() != call.outputs.len() {
            let (got, expected) = (results.len(), call.outputs.len());
            let reason = format!("it returned {got} tensors, but {expected} were captured");
            return Err(failed(index, node, reason));
        }
        for (output, tensor) in call.outputs.iter().zip(results) {
            self.interpreter
                .register_tensor_to_device(output.id, tensor);
        }
        Ok(())
    }

    fn run_collective(&mut self, index: usize, node: &Node) -> Result<(), Error> {
        let Some(collective) = &node.collective else {
            return Ok(());
        };
        let fail = |failure| match failure {
            Failure::Collective(source) => Error::Collective {
                node: index,
                source: Arc::new(source),
            },
            Failure::Other(reason) => failed(index, node, reason),
        };
        let started = match collective.stage {
            Stage::Wait => {
                let key = node.inputs().next();
                let started = key.and_then(|key| self.flights.started.remove(&key));
                started.ok_or_else(|| failed(index, node, "it was not started".to_owned()))?
            }
            Stage::Whole | Stage::Start => {
                let inputs = node.operation.inputs();
                let given = inputs.map(|input| {
                    let sealed = self.seals.get(input.id);
                    let is_here = !self.absent.contains(input.id);
                    is_here.then(|| (self.interpreter.get_tensor(input), sealed))
                });
                let tensors = given.collect();
                let group = self.along(&collective.axis);
                let group = group.map_err(|reason| failed(index, node, reason))?;
                let along = Along::<B> {
                    group,
                    staging: &self.flights.staging,
                    device: self.interpreter.device(),
                };
                collective::start(&along, collective, tensors).map_err(fail)?
            }
        };
        if collective.stage == Stage::Start {
            if let Some(key) = node.outputs().next() {
                self.flights.started.insert(key, started);
            }
            return Ok(());
        }
        let results = started.wait::<B>(&self.group).map_err(fail)?;
        let outputs = node.operation.outputs();
        for (part, (output, result)) in outputs.zip(results).enumerate() {
            if self.absent.contains(output.id) {
                continue;
            }
            self.set_result(output, (collective, part), result);
        }
        Ok(())
    }

    /// Returns the address of a result.
    fn address(&mut self, output: &TensorIr) -> Option<Address> {
        let tensor = TensorIr {
            status: TensorStatus::ReadOnly,
            ..output.clone()
        };
        let handle = catch_unwind(AssertUnwindSafe(|| self.interpreter.get_tensor(&tensor)));
        Some(Address::of::<B>(output.id, &handle.ok()?))
    }
}

impl<B: BackendIr> fmt::Debug for Executor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("group", &self.group)
            .field("live_bytes", &self.table.live_bytes())
            .finish_non_exhaustive()
    }
}
