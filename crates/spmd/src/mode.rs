//! How a step is compiled.

use std::sync::Arc;

use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::{Mesh, Partition, Pattern, Placement};

use crate::error::Error;
use crate::graph::{Graph, ParameterLayout};
use crate::passes::schedule::{self, OptimizerPlace};
use crate::passes::{DeferOptimizer, Iteration, Pipeline, verify};
use crate::place::{DataParallel, Expand, ExpandPlacements, least_communication_with};
use crate::ranks::{DATA_AXIS, Ranks};
use crate::trace::{InputSpec, ParameterSpec};
use crate::transform::GraphTransform;

/// How a step is compiled: over which ranks, and by which passes.
#[derive(Debug, Clone)]
pub struct Mode {
    ranks: Ranks,
    division: Division,
    /// Names of inputs that all ranks have alike.
    shared: Vec<Pattern>,
    pub(crate) options: schedule::Options,
    pub(crate) cache: usize,
    pub(crate) verify: bool,
    pub(crate) transforms: Vec<Arc<dyn GraphTransform>>,
}

/// Who does what.
#[derive(Debug, Clone)]
enum Division {
    /// Every rank its part of the batch.
    DataParallel(DataParallel),
    /// Every value by its placements on a mesh.
    Expand(Mesh, Expand),
    /// The same on one axis, by the placements that move the fewest bytes; found with the first graph.
    Least(Option<Expand>),
}

impl Mode {
    /// A single rank.
    pub fn single() -> Self {
        Self::data_parallel(ProcessGroup::solo(), DataParallel::Replicate)
    }

    /// The ranks of a group divide the batch among them.
    pub fn data_parallel(group: ProcessGroup, style: DataParallel) -> Self {
        let division = match style {
            DataParallel::Default => Division::Least(None),
            style => Division::DataParallel(style),
        };
        Self::new(Ranks::line(group), division)
    }

    /// The ranks of a mesh divide values by the user's placements. The loss is that of the joined batch,
    /// with the statistics of all of it, and every rank returns it.
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
        let division = Division::Expand(mesh.layout().clone(), expand);
        Self::new(Ranks::of_mesh(mesh), division)
    }

    fn new(ranks: Ranks, division: Division) -> Self {
        Self {
            ranks,
            division,
            shared: Vec::new(),
            options: schedule::Options::default(),
            cache: 8,
            verify: cfg!(debug_assertions),
            transforms: Vec::new(),
        }
    }

    /// Which passes schedule the graph, and how.
    #[must_use]
    pub fn with_options(mut self, options: schedule::Options) -> Self {
        self.options = options;
        self
    }

    /// How many graphs are kept: one for the first step, and one for every other set of input shapes.
    /// 8 by default, at least 1; the one used longest ago goes first.
    #[must_use]
    pub fn with_cache(mut self, num_graphs: usize) -> Self {
        self.cache = num_graphs.max(1);
        self
    }

    /// For [`DataParallel::Default`]: the batch's tensors that match a pattern have no batch dim, and all ranks
    /// pass the same; such as the weights of classes, or a temperature. All others are joined along their first
    /// dim. [`Expand`] replicates what it does not name, and the other styles join nothing.
    #[must_use]
    pub fn with_shared_input(mut self, pattern: impl Into<Pattern>) -> Self {
        self.shared.push(pattern.into());
        self
    }

    /// Verifies the graph after each pass, as debug builds always do.
    #[must_use]
    pub fn verified(mut self) -> Self {
        self.verify = true;
        self
    }

    /// Adds a pass of the user, after the insertion of collectives and before scheduling.
    #[must_use]
    pub fn with_transform(mut self, transform: impl GraphTransform + 'static) -> Self {
        self.transforms.push(Arc::new(transform));
        self
    }

    /// The ranks, and their mesh.
    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Shape of the joined tensor of the batch, of which every rank has one of `shape`: what is traced.
    pub(crate) fn joined_shape(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        match &self.division {
            Division::DataParallel(_) => shape.to_vec(),
            Division::Expand(mesh, expand) => expand.joined_shape(mesh, name, shape),
            Division::Least(_) => {
                let mut shape = shape.to_vec();
                let is_shared = self.shared.iter().any(|pattern| pattern.matches(name));
                if let Some(rows) = shape.first_mut().filter(|_| !is_shared) {
                    *rows *= self.ranks.size();
                }
                shape
            }
        }
    }

    /// How a parameter or buffer lies until there is a graph.
    pub(crate) fn initial_layout(&self, spec: &ParameterSpec) -> Result<ParameterLayout, Error> {
        match &self.division {
            Division::DataParallel(DataParallel::FullyShard) if !spec.is_buffer => {
                let num_elements = spec.shape.iter().product();
                let partition = Partition::flat(num_elements, self.ranks.size())?;
                Ok(ParameterLayout::Flat(partition))
            }
            Division::Expand(mesh, expand) if !spec.is_buffer => {
                let placed = expand.of_parameter(mesh, &spec.path, &spec.shape)?;
                let is_whole = placed.iter().all(|p| p.placement == Placement::Replicate);
                Ok(match is_whole {
                    true => ParameterLayout::Whole,
                    false => ParameterLayout::Placed(placed.into()),
                })
            }
            _ => Ok(ParameterLayout::Whole),
        }
    }

    /// Refuses placements of what is not there.
    pub(crate) fn check_names(
        &self,
        specs: &[ParameterSpec],
        inputs: &[InputSpec],
    ) -> Result<(), Error> {
        for pattern in &self.shared {
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

    /// Whether something is left to decide by the first graph.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.division, Division::Least(None))
    }

    /// Takes back what [`decide`](Self::decide) decided.
    pub(crate) fn reopen(&mut self) {
        self.division = Division::Least(None);
    }

    /// Decides what is left to decide, by the first graph of the joined batch.
    pub(crate) fn decide(&mut self, graph: &Graph) -> Result<(), Error> {
        match &self.division {
            Division::DataParallel(_) | Division::Expand(..) | Division::Least(Some(_)) => Ok(()),
            Division::Least(None) => {
                let mesh = self.ranks.mesh()?;
                let found = least_communication_with(graph, &mesh, DATA_AXIS, &self.shared)?;
                self.division = Division::Least(Some(found));
                Ok(())
            }
        }
    }

    /// The passes.
    fn pipeline(&self) -> Result<Pipeline, Error> {
        let num_ranks = self.ranks.size();
        let pipeline = match &self.division {
            Division::DataParallel(style) => {
                schedule::pipeline(num_ranks, *style, &self.options, &self.transforms)
            }
            Division::Least(None) => {
                return Err(Error::Internal("placements are not decided".to_owned()));
            }
            Division::Expand(_, expand) | Division::Least(Some(expand)) => {
                let insert = ExpandPlacements {
                    expand: expand.clone(),
                    mesh: self.ranks.mesh()?,
                };
                schedule::pipeline_with(insert, &self.options, &self.transforms)
            }
        };
        Ok(match self.verify {
            true => pipeline.verified(),
            false => pipeline,
        })
    }
}

/// A step's graphs, ready to run.
#[derive(Debug)]
pub(crate) enum Lowered {
    /// One for every step.
    Whole(Box<Graph>),
    /// The optimizer runs in the step after.
    Iteration(Box<Iteration>),
}

/// Applies the passes of a mode to a graph of one rank, over the joined batch where the mode has one. Of a
/// mode whose optimizer runs in the next forward pass, the main graph.
///
/// # Errors
///
/// Those of the passes.
pub fn lower(graph: Graph, mode: &Mode) -> Result<Graph, Error> {
    let mut mode = mode.clone();
    mode.decide(&graph)?;
    Ok(match lower_all(graph, &mode)? {
        Lowered::Whole(graph) => *graph,
        Lowered::Iteration(iteration) => iteration.main,
    })
}

/// All graphs of a mode.
pub(crate) fn lower_all(graph: Graph, mode: &Mode) -> Result<Lowered, Error> {
    let graph = mode.pipeline()?.run(graph)?;
    if mode.options.optimizer != OptimizerPlace::InNextForward {
        return Ok(Lowered::Whole(Box::new(graph)));
    }
    let iteration = DeferOptimizer.split(graph)?;
    if mode.verify {
        for graph in [&iteration.setup, &iteration.main, &iteration.cleanup] {
            verify(graph)?;
        }
    }
    Ok(Lowered::Iteration(Box::new(iteration)))
}
