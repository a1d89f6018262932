//! The mode of a compiled step, and its application to a graph.

mod certify;
mod division;
mod draws;
mod dumps;
mod owners;
mod owning;
mod pass_states;
mod pipelines;
mod proofs;
mod states;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::{Layout, Pattern, Strategy};
use burn_fsdp_tensors::{StateFormat, can_reduce};

use crate::Precision;
use crate::dump::GraphDump;
use crate::error::{Error, MoveError, OptionError, ScaleError};
use crate::graph::{Graph, Role, cut_of};
use crate::passes::schedule;
use crate::passes::{IterationMove, Replicate};
use crate::place::{DataParallel, Expand, cut_inputs, least_communication_with};
use crate::ranks::{DATA_AXIS, Ranks};
use crate::trace::{Defaults, InputSpec, LOSS_FACTOR, ParameterSpec, TraceOptions};
use crate::transform::GraphTransform;
pub use certify::Certify;
use division::Division;
use owners::Owners;

/// The settings of a compiled step: its ranks, the division of values among them, and the passes with their options.
#[derive(Debug, Clone)]
pub struct Mode {
    ranks: Ranks,
    division: Division,
    names: Names,
    pub(crate) options: schedule::Options,
    pub(crate) cache: usize,
    pub(crate) verify: bool,
    certified: Certify,
    /// Fingerprints of the proved plans, if only these may run.
    proved: Option<BTreeSet<u64>>,
    /// The seed of random numbers; without one, the backend draws them.
    seed: Option<u64>,
    user: UserPasses,
    dump: Option<GraphDump>,
}

/// The user's choices by pattern.
#[derive(Debug, Clone, Default)]
struct Names {
    /// The inputs that are the same on all ranks.
    shared: Vec<Pattern>,
    /// The parameters that one rank holds whole.
    owners: Owners,
    /// The parameters whose optimizer states are kept in fewer bits; empty until the optimizers are known.
    states: BTreeMap<Arc<str>, StateFormat>,
}

/// The user's passes.
#[derive(Debug, Clone, Default)]
struct UserPasses {
    transforms: Vec<Arc<dyn GraphTransform>>,
    /// The passes that move nodes into the next step.
    moves: Vec<Arc<dyn IterationMove>>,
}

/// The purpose of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// A step of one batch.
    Step,
    /// A step of the given number of micro-batches.
    Micro(usize),
}

impl Mode {
    /// Creates the mode for a single rank.
    pub fn single() -> Self {
        Self::data_parallel(ProcessGroup::solo(), Strategy::NoShard)
    }

    /// Creates a mode in which the ranks of a group divide the batch among them.
    pub fn data_parallel(group: ProcessGroup, style: impl Into<DataParallel>) -> Self {
        let division = match style.into() {
            DataParallel::Automatic => Division::Least(None),
            style => Division::DataParallel(style),
        };
        Self::new(Ranks::line(group), division)
    }

    /// Creates a mode in which the ranks of a group divide the batch, with parameter placements chosen to move few
    /// bytes: [`DataParallel::Automatic`].
    pub fn automatic(group: ProcessGroup) -> Self {
        Self::data_parallel(group, DataParallel::Automatic)
    }

    /// Creates a mode of hybrid sharding. The ranks of a mesh of two axes divide the batch among them. Shards are
    /// distributed along one axis, and the ranks along `replicate` hold copies of them. Gradients are reduced to shards
    /// along the axis of the shards, and then averaged along `replicate`.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] for an axis that the mesh does not have, [`Error::Hybrid`] if it does not have two axes, or for
    /// [`Strategy::NoShard`], which has no shards to copy.
    pub fn hybrid(mesh: ProcessMesh, replicate: &str, strategy: Strategy) -> Result<Self, Error> {
        let axes = mesh.mesh().axes();
        let copies = mesh.mesh().axis(replicate)?.clone();
        let shard = axes.iter().find(|axis| axis.name != replicate);
        let (Some(shard), 2, true) = (shard, axes.len(), strategy != Strategy::NoShard) else {
            return Err(Error::Hybrid {
                strategy,
                axes: axes.len(),
            });
        };
        let division = Division::Hybrid {
            strategy,
            shard: shard.clone(),
            replicate: Replicate {
                axis: copies,
                is_first: axes[0].name == replicate,
            },
        };
        Ok(Self::new(Ranks::of_mesh(mesh), division))
    }

    /// Creates a mode in which the ranks of a mesh divide values according to the user's placements. The loss and all
    /// batch statistics are computed over the joined batch, and every rank returns the same loss.
    ///
    /// ```
    /// use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
    /// use burn_fsdp_mesh::{Mesh, Placement::Shard};
    /// use burn_fsdp_spmd::{Expand, Mode};
    ///
    /// let world = ProcessGroup::solo();
    /// let mesh = ProcessMesh::new(&world, Mesh::new([("data", 1), ("model", 1)])?)?;
    /// let expand = Expand::new()
    ///     .parameter("blocks.*.fc.weight", "model", Shard(1))
    ///     .input("**", "data", Shard(0));
    /// let mode = Mode::expand(mesh, expand);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn expand(mesh: ProcessMesh, expand: Expand) -> Self {
        let division = Division::Expand(mesh.mesh().clone(), expand);
        Self::new(Ranks::of_mesh(mesh), division)
    }

    fn new(ranks: Ranks, division: Division) -> Self {
        Self {
            ranks,
            division,
            names: Names::default(),
            options: schedule::Options::default(),
            cache: 8,
            verify: cfg!(debug_assertions),
            certified: Certify::default(),
            proved: None,
            seed: None,
            user: UserPasses::default(),
            dump: None,
        }
    }

    /// Draws the random numbers of steps, such as dropout masks, from a seed instead of Burn's process-wide generator.
    /// All ranks must pass the same seed.
    ///
    /// Each number is then a function of the seed, the number of the step ([`CompiledStep::num_steps`]) and of its
    /// micro-batch, the position of the operation among the operations that draw, and the position of the element. Runs
    /// are reproducible, and a run that is [resumed](crate::CompiledStep::resume) continues as if it had not stopped.
    /// With placements ([`expand`](Self::expand), [`DataParallel::Automatic`]), the position of an element is its
    /// position in the whole tensor. The step then draws the same numbers as a single rank with the same seed would
    /// draw for the joined batch, without gathering anything. Otherwise every rank draws separate numbers for its part
    /// of the batch.
    ///
    /// The numbers differ from those of Burn's generator with the same seed, and may change with the version of the
    /// crate `rand`. The seed does not affect evaluations, initial values, custom operations or random numbers of an
    /// optimizer.
    ///
    /// ```
    /// use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
    /// use burn::module::Module;
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fsdp_spmd::{Mode, compile};
    ///
    /// #[derive(Module, Debug)]
    /// struct Model {
    ///     fc: Linear,
    ///     dropout: Dropout,
    /// }
    ///
    /// let losses = || {
    ///     let init = |device: &Device| Model {
    ///         fc: LinearConfig::new(3, 1).with_initializer(burn::nn::Initializer::Ones).init(device),
    ///         dropout: DropoutConfig::new(0.5).init(),
    ///     };
    ///     let loss = |model: &Model, x: Tensor<2>| model.fc.forward(model.dropout.forward(x)).square().mean();
    ///     let mut step = compile(init, loss, SgdConfig::new().build(), Mode::single().seeded(7))?;
    ///     let x = Tensor::ones([8, 3], &Device::flex());
    ///     Ok::<_, burn_fsdp_spmd::Error>([step.step(1e-2, &x)?, step.step(1e-2, &x)?])
    /// };
    /// assert_eq!(losses()?, losses()?);
    /// # Ok::<(), burn_fsdp_spmd::Error>(())
    /// ```
    ///
    /// [`CompiledStep::num_steps`]: crate::CompiledStep::num_steps
    #[must_use]
    pub fn seeded(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets the passes that schedule the graph, and their options.
    #[must_use]
    pub fn options(mut self, options: schedule::Options) -> Self {
        self.options = options;
        self
    }

    /// Sets the number of graphs to keep. There is one graph for each combination of input shapes and types, values
    /// named with [`BatchMapper::fixed`](crate::BatchMapper::fixed), number of micro-batches, and optimizer operations.
    /// An optimizer that creates its states in the first step has a separate graph for it. The default is 8 and the
    /// minimum is 1; the least recently used graph is evicted first.
    #[must_use]
    pub fn cache(mut self, num_graphs: usize) -> Self {
        self.cache = num_graphs.max(1);
        self
    }

    /// Declares that the batch's tensors that match a pattern have no batch dim and are equal on all ranks, such as
    /// class weights or a temperature. This is for [`DataParallel::Automatic`], which joins all other tensors along
    /// their first dim. [`Expand`] replicates tensors that it does not name, and the other styles do not join tensors.
    #[must_use]
    pub fn shared_input(mut self, pattern: impl Into<Pattern>) -> Self {
        self.names.shared.push(pattern.into());
        self
    }

    /// Verifies the graph after each pass, as debug builds always do.
    #[must_use]
    pub fn verified(mut self) -> Self {
        self.verify = true;
        self
    }

    /// Turns off kernels and fusion, for a backend without kernels.
    pub(crate) fn without_kernels(mut self) -> Self {
        self.options.kernels = false;
        self.options.fuse = false;
        self
    }

    /// Returns the ranks, with their mesh.
    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Returns the shape that a tensor has in the joined batch, over which the step is traced. `shape` is its shape on
    /// each rank.
    pub(crate) fn joined_shape(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        match &self.division {
            Division::DataParallel(_) | Division::Hybrid { .. } => shape.to_vec(),
            Division::Expand(mesh, expand) => expand.joined_shape(mesh, name, shape),
            Division::Least(_) => {
                let mut shape = shape.to_vec();
                let is_shared = self
                    .names
                    .shared
                    .iter()
                    .any(|pattern| pattern.matches(name));
                let is_shared = is_shared || name == LOSS_FACTOR;
                if let Some(rows) = shape.first_mut().filter(|_| !is_shared) {
                    *rows *= self.ranks.size();
                }
                shape
            }
        }
    }

    /// Returns the mode's options for a trace on a device with these default types.
    pub(crate) fn trace_options(&self, defaults: Option<Defaults>) -> TraceOptions {
        TraceOptions {
            defaults,
            precision: self.options.precision.clone(),
            scales_loss: self.options.loss_scaling.is_some(),
            activations: match &self.division {
                Division::Expand(_, expand) => expand.asked_activations(),
                _ => Vec::new(),
            },
            ..TraceOptions::default()
        }
    }

    /// Returns the layout of a parameter or buffer before there is a graph.
    pub(crate) fn initial_layout(&self, spec: &ParameterSpec) -> Result<Layout, Error> {
        let (mesh, owners) = (self.ranks.mesh()?, &self.names.owners);
        let cut = cut_of(self.names.states.get(&spec.path).copied());
        self.division.initial_layout(&mesh, spec, (owners, cut))
    }

    /// Rejects patterns that match no parameter or input.
    pub(crate) fn check_names(
        &self,
        specs: &[ParameterSpec],
        inputs: &[InputSpec],
    ) -> Result<(), Error> {
        for pattern in &self.names.shared {
            if !inputs.iter().any(|input| pattern.matches(&input.name)) {
                let known: Vec<_> = inputs.iter().map(|input| input.name.as_str()).collect();
                return Err(Error::UnknownName {
                    what: "input",
                    name: pattern.to_string(),
                    known: known.join(", "),
                });
            }
        }
        let Division::Expand(mesh, expand) = &self.division else {
            return Ok(());
        };
        let parameters = specs.iter().filter(|spec| !spec.is_buffer);
        let paths = parameters.map(|spec| spec.path.as_ref());
        let names = inputs.iter().map(|input| input.name.as_str());
        expand.check_names(mesh, paths, names)
    }

    /// Rejects inputs of an evaluation without a placement, if the user's placements cut inputs.
    pub(crate) fn check_evaluation(&self, inputs: &[InputSpec]) -> Result<(), Error> {
        let Division::Expand(_, expand) = &self.division else {
            return Ok(());
        };
        match expand.unplaced(inputs.iter().map(|input| input.name.as_str())) {
            None => Ok(()),
            Some(name) => Err(Error::Evaluation {
                reason: format!(
                    "the step cuts its batch, but the evaluation's \"{name}\" has no placement; give the batch the same \
                     names as in training, or evaluate with a tuple of the same form"
                ),
            }),
        }
    }

    /// Rejects full-precision module patterns that match none of these parameters. `paths` should include all fields
    /// that share a parameter; a graph contains only the first.
    pub(crate) fn check_full(&self, paths: &[&str]) -> Result<(), Error> {
        match self.options.precision.unmatched(paths) {
            Some(pattern) => Err(Error::UnknownName {
                what: "module in full precision",
                name: pattern.to_owned(),
                known: paths.join(", "),
            }),
            None => Ok(()),
        }
    }

    /// Rejects options that cannot be combined, and types in which the mode cannot compute. `parameters` lists each
    /// parameter, but no buffer, by path and type.
    pub(crate) fn check_precision(&self, parameters: &[(&str, DType)]) -> Result<(), Error> {
        let precision = &self.options.precision;
        self.check_loss_chunks()?;
        if let Some(scaling) = &self.options.loss_scaling {
            if let Some(fault) = scaling.fault() {
                return Err(ScaleError::from(fault).into());
            }
            if self.moves_nodes() {
                return Err(MoveError::Scaled.into());
            }
        }
        if *precision == Precision::default() {
            return Ok(());
        }
        let types = parameters.iter().map(|(path, dtype)| {
            let compute = precision.compute_of(path, *dtype);
            [*dtype, compute, precision.reduce_of(compute)]
        });
        let types: Vec<[DType; 3]> = types.collect();
        let has_halves = |of: &[DType; 3]| of[0] != DType::F16 && of[1..].contains(&DType::F16);
        if !types.iter().all(|of| can_reduce(*of)) {
            return Err(Error::Precision {
                what: "from or to f64 or flex32, which cannot be reduced to other types",
                way_out: "build the model in f32",
            });
        }
        if types.iter().any(has_halves) && self.options.loss_scaling.is_none() {
            Err(Error::Precision {
                what: "in f16 without loss scaling",
                way_out: "scale the loss (Options::scale_loss), or use bf16",
            })
        } else {
            Ok(())
        }
    }

    /// Rejects a loss in parts where the logits have placements, and a loss in no part.
    fn check_loss_chunks(&self) -> Result<(), OptionError> {
        let chunks = self.options.loss_chunks;
        let reason = match (chunks, self.division.is_placed()) {
            (0, _) => "there is no number to divide the rows by".to_owned(),
            (2.., true) => "placements divide the rows among the ranks".to_owned(),
            _ => return Ok(()),
        };
        Err(OptionError::LossChunks { chunks, reason })
    }

    /// Returns the purpose of a graph for a step with the given number of micro-batches. With loss scaling, even a
    /// single micro-batch has its own graph, because the host checks the gradients before the optimizer runs.
    pub(crate) fn purpose(&self, num_batches: usize) -> Purpose {
        match num_batches {
            0 | 1 if self.options.loss_scaling.is_none() => Purpose::Step,
            several => Purpose::Micro(several.max(1)),
        }
    }

    /// Returns true if the next graph decides the placements.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.division, Division::Least(None))
    }

    /// Reverts the decision of [`decide`](Self::decide).
    pub(crate) fn reopen(&mut self) {
        self.division = Division::Least(None);
    }

    /// Checks the options against a traced step, declares the states of passes, assigns owners, numbers the random draws if the mode has a seed, and
    /// decides the placements that are left open.
    pub(crate) fn prepare(&mut self, mut graph: Graph) -> Result<Graph, Error> {
        self.declare_pass_states(&mut graph)?;
        let parameters = graph.parameters().iter().filter(|of| !of.is_buffer);
        let parameters: Vec<_> = parameters.collect();
        let shapes = parameters.iter().map(|of| (&of.path, of.shape.as_slice()));
        self.assign_owners(shapes)?;
        self.check_states(&parameters)?;
        let parameters: Vec<_> = parameters.iter().map(|of| (&*of.path, of.dtype)).collect();
        self.check_precision(&parameters)?;
        if self.options.loss_scaling.is_some() && !takes_loss_factor(&graph) {
            return Err(ScaleError::NotTraced.into());
        }
        let graph = match self.seed {
            Some(seed) => draws::numbered(graph, seed, !self.division.is_placed()),
            None => graph,
        };
        self.decide(&graph)?;
        Ok(graph)
    }

    /// Returns true if random numbers come from a seed.
    pub(crate) fn is_seeded(&self) -> bool {
        self.seed.is_some()
    }

    /// Decides the open placements from the first graph of the joined batch. Inputs that first appear in a later graph
    /// are placed by that graph.
    pub(crate) fn decide(&mut self, graph: &Graph) -> Result<(), Error> {
        match &mut self.division {
            Division::DataParallel(_) | Division::Hybrid { .. } | Division::Expand(..) => Ok(()),
            Division::Least(Some(found)) => {
                found.add_inputs(cut_inputs(graph, DATA_AXIS, &self.names.shared));
                Ok(())
            }
            Division::Least(None) => {
                let mesh = self.ranks.mesh()?;
                let of = (DATA_AXIS, self.names.shared.as_slice());
                let found = least_communication_with(graph, &mesh, of, &self.options.precision)?;
                self.division = Division::Least(Some(found));
                Ok(())
            }
        }
    }
}

/// Returns true if a graph was traced with a loss factor.
fn takes_loss_factor(graph: &Graph) -> bool {
    let mut inputs = graph.inputs().iter().filter_map(|id| graph.value(*id));
    inputs.any(|value| value.role == Role::Input(LOSS_FACTOR.into()))
}
