//! Checks that an optimizer can work on shards.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{DType, Device, Tensor};

use burn_fsdp_collectives::Fingerprint;

use crate::error::Error;
use crate::inspect::{self, Member};
use crate::parameter::current::trying;
use crate::probes::{LEN, SIDE, element, gradient_of_halves, tensor_of};

const NUM_STEPS: usize = 3;

/// The magnitudes of a trial's gradients.
#[derive(Debug, Clone, Copy)]
enum Gradients {
    Small,
    /// A value that exceeds any sensible clipping threshold but has a finite square, if the type has such a value.
    Large,
    /// Large values in the first half of the matrix, small ones in the second.
    Halves,
}

impl Gradients {
    const ALL: [Self; 3] = [Self::Small, Self::Large, Self::Halves];

    fn element(self, dtype: DType, i: usize, step: usize) -> f32 {
        match (self, dtype) {
            (Self::Small, _) => element(i, step),
            (Self::Large, DType::F16) => 1e4 * element(i, step),
            (Self::Large, _) => 1e18 * element(i, step),
            (Self::Halves, dtype) => gradient_of_halves(dtype, i, step),
        }
    }
}

/// Checks that `optimizer` updates a shard exactly as it would update the same elements of the whole
/// parameter, for every trainable parameter of a sharded module.
///
/// Burn does not expose which optimizers a [`ModuleOptimizer`] holds for its groups. So a copy of it without state
/// updates a small matrix under the path and id of each parameter, once whole and once in two shards. Optimizers that
/// compute with whole tensors (Muon, Adafactor, LAMB, Burn's gradient clipping by norm) then produce different bits.
/// They need parameters with [one owner](crate::ShardPolicy::one_owner). Parameters that optimizers see in their
/// original shape are not tried. Burn's `LBFGS`, which is not a `ModuleOptimizer`, needs the whole model and does not
/// work on shards either.
///
/// The first step with gradients from [`backward`](crate::backward) tries the optimizer on each parameter
/// automatically, but cannot see groups by ids. Call this function for an optimizer with groups by ids, and for a
/// second optimizer of the same parameters. Also call it if the loop calls Burn's own backward or accumulates
/// gradients, because the first step then cannot try the optimizer and only warns. Checkpoints and the file-backed
/// optimizer of `burn-fsdp` call it themselves.
///
/// Not collective: all ranks get the same result. It costs a few small steps for each parameter; call it once, before
/// training.
///
/// # Errors
///
/// [`Error::WholeTensors`] with the first parameter whose updates differ; [`Error::NotSharded`].
pub fn check_elementwise<M: Module>(module: &M, optimizer: &ModuleOptimizer) -> Result<(), Error> {
    let roots = inspect::roots_of(module)?;
    for (path, member) in inspect::places(module) {
        let slot = member.slot();
        // The optimizer sees a whole parameter in its own shape, as before sharding.
        if !slot.is_flattened() || !member.generation.is_trainable(member.index) {
            continue;
        }
        let trial = Trial::of(optimizer, &path, &member);
        let num_shards = if slot.is_cut() { 2 } else { 1 };
        let mut all = Gradients::ALL.into_iter();
        if !all.all(|gradients| trying(|| trial.passes(num_shards, gradients))) {
            return Err(Error::WholeTensors { path });
        }
        let unit = &member.generation.unit;
        let root = roots.iter().find(|root| root.owns(unit));
        if let Some(root) = root {
            root.trial.pass(member.id);
        }
    }
    Ok(())
}

/// Runs [`check_elementwise`], unless an earlier call of this function has passed for this module or an earlier version
/// of it. Functions that take both a module and an optimizer, such as those for checkpoints, call it.
///
/// # Errors
///
/// As [`check_elementwise`].
pub fn check_elementwise_once<M: Module>(
    module: &M,
    optimizer: &ModuleOptimizer,
) -> Result<(), Error> {
    let members = inspect::members(module);
    let first = members.first().ok_or(Error::NotSharded)?;
    if first.generation.unit.is_tried(first.index) {
        return Ok(());
    }
    check_elementwise(module, optimizer)?;
    first.generation.unit.set_tried(first.index);
    Ok(())
}

/// Checks that the optimizers of all ranks are equal, for every trainable parameter of a sharded module. Otherwise
/// ranks would silently train an unintended model, for example with different betas.
///
/// Burn does not expose an optimizer's settings. So a copy of it without state runs a few steps on a small matrix under
/// the path and id of each parameter, and ranks compare the bits. The learning rate is an argument of each step, and is
/// not compared.
///
/// Collective over all ranks of the module, between steps: one exchange, with 8 bytes for each trainable parameter. If
/// ranks are threads of one program, their optimizers cannot differ.
///
/// # Errors
///
/// [`Error::OptimizersDiffer`] on all ranks, with the first parameter whose updates differ; [`Error::NotSharded`]; a
/// failed collective.
pub fn check_same_optimizer<M: Module>(
    module: &M,
    optimizer: &ModuleOptimizer,
) -> Result<(), Error> {
    let group = inspect::root_of(module)?.group.clone();
    let (mut paths, mut own) = (Vec::new(), Vec::new());
    for (path, member) in inspect::places(module) {
        if !member.generation.is_trainable(member.index) {
            continue;
        }
        let trial = Trial::of(optimizer, &path, &member);
        let bits = trial.run::<2>([SIDE, SIDE], 0, Gradients::Small);
        own.extend(Fingerprint::of(&bits).to_le_bytes());
        paths.push(path);
    }
    let all = group.exchange("agreement on the optimizer", own)?;
    for (index, path) in paths.into_iter().enumerate() {
        let of = |rank: usize| all[rank].chunks_exact(8).nth(index);
        if let Some(rank) = (1..all.len()).find(|rank| of(*rank) != of(0)) {
            return Err(Error::OptimizersDiffer { rank, path });
        }
    }
    Ok(())
}

struct Trial<'a> {
    optimizer: &'a ModuleOptimizer,
    id: ParamId,
    path: Vec<String>,
    device: Device,
    /// The element type of the parameter, which may differ from the device's default.
    dtype: DType,
}

impl<'a> Trial<'a> {
    /// Creates a trial of `optimizer` on the parameter at `path`.
    fn of(optimizer: &'a ModuleOptimizer, path: &str, member: &Member) -> Self {
        Self {
            optimizer,
            id: member.id,
            path: path.split('.').map(str::to_owned).collect(),
            device: member.generation.value(member.index).device(),
            dtype: member.slot().elements.stored.dtype,
        }
    }

    /// Returns true if the whole matrix and its shards (as rows, then flat) end with the same bits.
    fn passes(&self, num_shards: usize, gradients: Gradients) -> bool {
        let Some(whole) = self.run::<2>([SIDE, SIDE], 0, gradients) else {
            // The optimizer does not accept a matrix at all, sharded or not; its own error will report that.
            return true;
        };
        let shards = |shape: &dyn Fn(usize) -> Option<Vec<u8>>| {
            let len = LEN / num_shards;
            let size = self.dtype.size();
            (0..num_shards).all(|shard| {
                let start = shard * len;
                shape(start).as_deref() == Some(&whole[start * size..][..len * size])
            })
        };
        // Rows come first: an optimizer that needs two dimensions then fails without a panic message.
        shards(&|start| self.run([SIDE / num_shards, SIDE], start, gradients))
            && shards(&|start| self.run([LEN / num_shards], start, gradients))
    }

    /// Returns the bits of the elements from `start` on, after some steps; `None` after a panic.
    fn run<const D: usize>(
        &self,
        shape: [usize; D],
        start: usize,
        gradients: Gradients,
    ) -> Option<Vec<u8>> {
        let stepped = catch_unwind(AssertUnwindSafe(|| {
            let mut optimizer = self
                .optimizer
                .clone()
                .load_record(OptimizerRecord::default());
            let value = self.tensor(shape, |i| element(start + i, 0)).require_grad();
            let mut probe = Probe::new(self.path.clone(), Param::initialized(self.id, value));
            for step in 1..=NUM_STEPS {
                let gradient =
                    self.tensor(shape, |i| gradients.element(self.dtype, start + i, step));
                let mut of_step = GradientsParams::new();
                of_step.register(self.id, gradient.inner());
                probe = optimizer.step(1e-2, probe, of_step);
            }
            probe.param.base().into_data()
        }));
        Some(stepped.ok()?.as_bytes().to_vec())
    }

    fn tensor<const D: usize>(
        &self,
        shape: [usize; D],
        element: impl Fn(usize) -> f32,
    ) -> Tensor<D> {
        tensor_of(shape, element, &self.device, self.dtype)
    }
}

/// A module with a single parameter at any path, used to run an optimizer on one parameter of a larger module.
#[derive(Debug, Clone)]
pub struct Probe<const D: usize> {
    path: Vec<String>,
    param: Param<Tensor<D>>,
}

impl<const D: usize> Probe<D> {
    /// Creates a module with `param` as its only parameter, at `path`.
    pub fn new(path: Vec<String>, param: Param<Tensor<D>>) -> Self {
        Self { path, param }
    }

    /// Returns the parameter.
    pub fn param(&self) -> &Param<Tensor<D>> {
        &self.param
    }

    fn with(self, param: impl FnOnce(Param<Tensor<D>>) -> Param<Tensor<D>>) -> Self {
        Self {
            path: self.path,
            param: param(self.param),
        }
    }
}

impl<const D: usize> Module for Probe<D> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.param.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|param| param.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|param| param.to_device(device))
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for name in &self.path {
            visitor.enter_module(name, "Probe");
        }
        self.param.visit(visitor);
        for name in self.path.iter().rev() {
            visitor.exit_module(name, "Probe");
        }
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        for name in &self.path {
            mapper.enter_module(name, "Probe");
        }
        let param = Module::map(self.param, mapper);
        for name in self.path.iter().rev() {
            mapper.exit_module(name, "Probe");
        }
        Self {
            path: self.path,
            param,
        }
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone().with(|param| param.valid())
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }
}
