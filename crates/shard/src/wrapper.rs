//! The wrapper around a sharded module.

use std::collections::HashSet;
use std::fmt;
use std::ops::Deref;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_collectives::AsMesh;
use burn_fsdp_mesh::Clip;
use burn_fsdp_tensors::{Batch, cast_floats};

use crate::error::Error;
use crate::inspect;
use crate::inspect::names::{check_names, parameter_paths};
use crate::inspect::plan::{self, wrap_plan};
use crate::optim::clip::{self, Clipped};
use crate::optim::elementwise;
use crate::policy::ShardPolicy;
use crate::slot::{Element, Elements};
use crate::state::agreement::{self, Agreement};
use crate::state::buffers::{self, BufferSync};
use crate::state::full::{self, WriteBack};
use crate::state::record;
use crate::step;
use crate::stepping;
use crate::wrap::fully_shard;

/// A fully sharded module, with the most common functions of this crate as methods: the wrapper form of
/// [`fully_shard`].
///
/// It is a [`Module`] that adds nothing to parameter paths, and it dereferences to the module, so `model.forward(x)`
/// and `model.blocks` still work. It may be a field of another module, which may also be wrapped: the outer one takes
/// the remaining parameters and orders the operations of both. Create the optimizer as usual, before or after wrapping.
///
/// ```no_run
/// # use burn::{module::Module, nn::{Linear, LinearConfig}, optim::AdamWConfig, tensor::{Device, Tensor}};
/// # use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
/// # use burn_fsdp_mesh::Mesh;
/// # use burn_fsdp_shard::{Clip, Error, FullyShardedDataParallel, ShardPolicy};
/// # fn train(world: &ProcessGroup, net: Linear, batch: Tensor<2>) -> Result<(), Error> {
/// let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
/// let mut model = FullyShardedDataParallel::new(net, &mesh, ShardPolicy::new())?;
/// let mut optimizer = AdamWConfig::new().init();
/// model.check_elementwise(&optimizer)?;
/// println!("{model}");
/// let gradients = model.backward(model.forward(batch).mean())?;
/// let clipped = model.clip_grad_norm(gradients, Clip::to(1.0))?;
/// model = optimizer.step(1e-3, model, clipped.gradients);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FullyShardedDataParallel<M> {
    module: M,
    policy: ShardPolicy,
    /// The type in which the first parameter that this wrapper sharded computes.
    input: Option<DType>,
    /// The type of results, if it is set.
    output: Option<DType>,
}

impl<M: Module> FullyShardedDataParallel<M> {
    /// Shards `module` like [`fully_shard`], and wraps it.
    ///
    /// Collective: all ranks of the policy's axes call it, with the same module structure and policy. For a subset of
    /// the ranks, create the mesh from a split group.
    ///
    /// # Errors
    ///
    /// As [`fully_shard`]; [`Error::AlreadySharded`] if nothing is left to shard; [`Error::Names`] if the
    /// module's own `map` loses parameters.
    pub fn new(module: M, mesh: &impl AsMesh, policy: ShardPolicy) -> Result<Self, Error> {
        let paths = parameter_paths(&module);
        let of_children: HashSet<String> = sharded_paths(&module).collect();
        let module = fully_shard(module, mesh, policy.clone())?;
        check_names(&paths, &module)?;
        let mut fields = inspect::fields(&module).into_iter();
        let first = fields.find(|(path, _)| !of_children.contains(path));
        Ok(Self {
            input: first.map(|(_, member)| member.slot().elements.compute.dtype),
            output: None,
            module,
            policy,
        })
    }

    /// Sets the type to which [`call`](Self::call) casts the float tensors of results, like FSDP2's `output_dtype`.
    /// Default: results keep their types.
    #[must_use]
    pub fn output_type(self, dtype: FloatDType) -> Self {
        Self {
            output: Some(dtype.into()),
            ..self
        }
    }

    /// Calls the module: runs `forward` with the module and `input`, and returns its result. The float tensors of
    /// `input` are cast to the type in which the first parameter that this wrapper sharded computes, like the inputs of a
    /// wrapped module in PyTorch. Those of the result are cast to the [`output_type`](Self::output_type), if it is set. Integers and
    /// booleans are unchanged. `input` and the result are tensors or any nesting of tensors, see [`Batch`].
    ///
    /// `model.forward(input)` calls the module's own function, without casts. Wrap a submodule and call it in this way to
    /// compute it in another type than the module around it, for example `BatchNorm` in full precision. Collective like
    /// `forward`.
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, tensor::{DType, Device, FloatDType, Tensor}};
    /// # use burn_fsdp_collectives::ProcessGroup;
    /// # use burn_fsdp_shard::{Error, FullyShardedDataParallel, Precision, ShardPolicy};
    /// let device = Device::flex().autodiff().gradient_checkpointing();
    /// let layer: Linear = LinearConfig::new(4, 2).init(&device);
    /// let policy = ShardPolicy::new().precision(Precision::new(FloatDType::BF16));
    /// let layer = FullyShardedDataParallel::new(layer, &ProcessGroup::solo(), policy)?;
    /// let layer = layer.output_type(FloatDType::F32);
    /// let output = layer.call(Tensor::<2>::ones([3, 4], &device), |layer, x| layer.forward(x));
    /// assert_eq!(output.dtype(), DType::F32);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn call<I: Batch, O: Batch>(&self, input: I, forward: impl FnOnce(&M, I) -> O) -> O {
        let output = forward(&self.module, cast(input, self.input));
        cast(output, self.output)
    }

    /// Returns the sharded module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Returns the sharded module, without the wrapper.
    pub fn into_inner(self) -> M {
        self.module
    }

    /// Returns the policy with which the module was sharded.
    pub fn policy(&self) -> &ShardPolicy {
        &self.policy
    }

    /// Calls [`backward`](crate::backward) with the module. Collective.
    ///
    /// # Errors
    ///
    /// As [`backward`](crate::backward).
    pub fn backward<const D: usize>(&self, loss: Tensor<D>) -> Result<GradientsParams, Error> {
        step::backward(loss, &self.module)
    }

    /// Calls [`backward_and_step`](crate::backward_and_step) with the module. Collective.
    ///
    /// # Errors
    ///
    /// As [`backward_and_step`](crate::backward_and_step), which consumes the module.
    pub fn backward_and_step<const D: usize>(
        self,
        loss: Tensor<D>,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
    ) -> Result<Self, Error>
    where
        M: 'static,
    {
        let module = stepping::backward_and_step(loss, self.module, optimizer, learning_rate)?;
        Ok(Self { module, ..self })
    }

    /// Calls [`clip_grad_norm`](crate::clip_grad_norm) with the module. Collective.
    ///
    /// # Errors
    ///
    /// As [`clip_grad_norm`](crate::clip_grad_norm).
    pub fn clip_grad_norm(&self, gradients: GradientsParams, clip: Clip) -> Result<Clipped, Error> {
        clip::clip_grad_norm(&self.module, gradients, clip)
    }

    /// Calls [`check_elementwise`](crate::check_elementwise) with the module.
    ///
    /// # Errors
    ///
    /// As [`check_elementwise`](crate::check_elementwise).
    pub fn check_elementwise(&self, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        elementwise::check_elementwise(self, optimizer)
    }

    /// Calls [`summon_full_params`](crate::summon_full_params) with the module. Collective.
    ///
    /// # Errors
    ///
    /// As [`summon_full_params`](crate::summon_full_params).
    pub fn summon_full_params(
        self,
        write_back: WriteBack,
        body: impl FnOnce(M) -> M,
    ) -> Result<Self, Error> {
        let module = full::summon_full_params(self.module, write_back, body)?;
        Ok(Self { module, ..self })
    }

    /// Calls [`sync_buffers`](crate::sync_buffers) with the module. Collective.
    ///
    /// # Errors
    ///
    /// As [`sync_buffers`](crate::sync_buffers).
    pub fn sync_buffers(self, sync: BufferSync) -> Result<Self, Error> {
        let module = buffers::sync_buffers(self.module, sync)?;
        Ok(Self { module, ..self })
    }

    /// Calls [`check_agreement`](crate::check_agreement) with the module. Collective.
    ///
    /// # Errors
    ///
    /// As [`check_agreement`](crate::check_agreement).
    pub fn check_agreement(&self, of: Agreement) -> Result<(), Error> {
        agreement::check_agreement(&self.module, of)
    }

    fn with(self, treat: impl FnOnce(M) -> M) -> Self {
        Self {
            module: treat(self.module),
            ..self
        }
    }
}

/// Returns the paths of the parameters that are already sharded.
fn sharded_paths<M: Module>(module: &M) -> impl Iterator<Item = String> + use<M> {
    inspect::fields(module).into_iter().map(|(path, _)| path)
}

/// Casts the float tensors of a nest, if a type is given.
fn cast<B: Batch>(nest: B, dtype: Option<DType>) -> B {
    match dtype {
        Some(dtype) => cast_floats(nest, dtype),
        None => nest,
    }
}

impl<M> Deref for FullyShardedDataParallel<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.module
    }
}

/// Forwards to the module's own functions. The wrapper has no parameters and adds nothing to paths.
impl<M: Module> Module for FullyShardedDataParallel<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|module| module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|module| module.to_device(device))
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.module.visit(visitor);
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        self.with(|module| module.map(mapper))
    }

    fn materialize(self) -> Self {
        self.with(Module::materialize)
    }

    fn num_params(&self) -> usize {
        plan::num_params(&self.module)
    }

    fn into_record(self) -> ModuleRecord {
        record::within_record(&self.module, || self.module.clone().into_record())
    }

    fn load_record(self, record: ModuleRecord) -> Self {
        let loaded = self.with(|module| module.load_record(record));
        inspect::settle_ids(&loaded.module);
        loaded
    }

    fn valid(&self) -> Self {
        Self {
            module: self.module.valid(),
            policy: self.policy.clone(),
            ..*self
        }
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }
}

impl<M: ModuleDisplay> ModuleDisplayDefault for FullyShardedDataParallel<M> {
    fn content(&self, content: Content) -> Option<Content> {
        content
            .add_debug_attribute("strategy", &self.policy.strategy)
            .add("module", &self.module)
            .optional()
    }
}

impl<M: ModuleDisplay> ModuleDisplay for FullyShardedDataParallel<M> {}

/// Prints the ranks, the policy's main settings, the element types, and the table of units.
impl<M: Module> fmt::Display for FullyShardedDataParallel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = inspect::members(&self.module);
        let (Ok(root), Ok(plan)) = (inspect::root_of(&self.module), wrap_plan(&self.module)) else {
            return f.write_str("FullyShardedDataParallel, no longer sharded");
        };
        let types = |of: fn(&Elements) -> Element| {
            let all = members.iter().map(|member| of(&member.slot().elements));
            let mut all: Vec<String> = all
                .map(|element| format!("{:?}", element.dtype).to_lowercase())
                .collect();
            all.sort();
            all.dedup();
            all.join(" and ")
        };
        let ShardPolicy {
            strategy,
            cut,
            whole_below,
            axis,
            ..
        } = &self.policy;
        writeln!(
            f,
            "FullyShardedDataParallel: rank {} of {} on axis \"{axis}\", {strategy:?}, {cut} shards in {}, computed in \
             {}, reduced in {}, whole below {whole_below} elements, {} units prefetched",
            root.group.rank(),
            root.group.size(),
            types(|elements| elements.stored),
            types(|elements| elements.compute),
            types(|elements| elements.reduce),
            root.prefetch(),
        )?;
        write!(f, "{plan}")
    }
}
