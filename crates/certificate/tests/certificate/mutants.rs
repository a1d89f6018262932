//! Wrong plans: seeded changes of right ones.

use std::collections::{BTreeMap, BTreeSet};

use burn::optim::AdamWConfig;
use burn_fsdp_certificate::prove;
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::{Clip, Mesh, Partition, ReduceOp};
use burn_fsdp_spmd::graph::{Collective, CollectiveKind, Graph, Node, Stage, Update};
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::passes::{
    AssignUnits, Bucket, CommonSubexpressions, DeadCode, Deduplicate, EarlyOptimizer,
    FusePointwise, GraphTransform, InsertCollectives, Liveness, PassId, Units, apply,
};
use burn_fsdp_spmd::{Error, Mode, Precision, Strategy, lower};
use burn_ir::{
    IrVisitorMut, NumericOperationIr, OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus,
};
use rand::rngs::StdRng;
use rand::seq::{IndexedMutRandom, IndexedRandom};
use rand::{RngExt, SeedableRng};

use super::traced;

/// A kind of fault that a pass, a rule or a plan may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mutation {
    /// A mean over ranks becomes a sum.
    Divisor,
    /// A reduction is skipped: each rank continues with its own addend.
    LostReduction,
    /// A reduction is performed twice.
    DoubledReduction,
    /// A collective runs along another axis.
    Axis,
    /// Two tensors of a joined collective are exchanged.
    SwappedParts,
    /// The elements are divided among the ranks in another way.
    Cut,
    /// A node reads another value of the same shape.
    WrongOperand,
    /// A number of an operation is replaced.
    Number,
    /// An addend of a sum is lost.
    LostAddend,
    /// An update is lost: the next step begins with the old value.
    LostUpdate,
    /// An update takes the value of another.
    WrongUpdate,
    /// A value is freed before its last read.
    FreedEarly,
    /// A node runs before its operands exist.
    TooEarly,
}

impl Mutation {
    const ALL: [Self; 13] = [
        Self::Divisor,
        Self::LostReduction,
        Self::DoubledReduction,
        Self::Axis,
        Self::SwappedParts,
        Self::Cut,
        Self::WrongOperand,
        Self::Number,
        Self::LostAddend,
        Self::LostUpdate,
        Self::WrongUpdate,
        Self::FreedEarly,
        Self::TooEarly,
    ];

    /// Returns the plan with such a fault, and a description of it; `None` if the plan has no place for one.
    fn of(self, plan: &Graph, rng: &mut StdRng) -> Option<(Graph, String)> {
        let mut plan = plan.clone();
        let mut nodes = plan.take_nodes();
        let what = match self {
            Self::LostUpdate | Self::WrongUpdate => {
                let updates = plan.updates().to_vec();
                let what = self.of_updates(&mut plan, updates, rng)?;
                plan.set_nodes(nodes);
                return Some((plan, what));
            }
            Self::DoubledReduction => doubled(&mut plan, &mut nodes, rng)?,
            Self::WrongOperand => wrong_operand(&plan, &mut nodes, rng)?,
            _ => self.of_nodes(&mut nodes, rng)?,
        };
        plan.set_nodes(nodes);
        Some((plan, what))
    }

    fn of_updates(
        self,
        plan: &mut Graph,
        mut updates: Vec<Update>,
        rng: &mut StdRng,
    ) -> Option<String> {
        let index = rng.random_range(0..updates.len());
        let shape = |id| plan.value(id).map(|value| value.shape.clone());
        let own = updates[index];
        match self {
            Self::LostUpdate => {
                updates.remove(index);
            }
            _ => {
                let others = updates
                    .iter()
                    .filter(|other| other.from != own.from && shape(other.from) == shape(own.from));
                let others: Vec<Update> = others.copied().collect();
                updates[index].from = others.choose(rng)?.from;
            }
        }
        *plan.updates_mut() = updates;
        Some(format!("update {index}"))
    }

    fn of_nodes(self, nodes: &mut Vec<Node>, rng: &mut StdRng) -> Option<String> {
        let found = nodes.iter().enumerate();
        let found: Vec<usize> = found
            .filter(|(index, _)| self.fits(nodes, *index))
            .map(|(index, _)| index)
            .collect();
        let index = *found.choose(rng)?;
        let what = format!("node {index}, {}", nodes[index].name());
        let node = &mut nodes[index];
        match self {
            Self::Divisor => node.collective.as_mut()?.reduction = Some(ReduceOp::Sum),
            Self::Axis => {
                let axis = &mut node.collective.as_mut()?.axis;
                *axis = if &**axis == "shard" {
                    "replicate".into()
                } else {
                    "shard".into()
                };
            }
            Self::Cut => {
                let part = node.collective.as_mut()?.parts.choose_mut(rng)?;
                let (len, shards) = (part.partition.num_elements(), part.partition.num_shards());
                part.partition = Partition::one_owner(len, shards, shards - 1).ok()?;
            }
            Self::SwappedParts => {
                let OperationIr::Custom(call) = &mut node.operation else {
                    return None;
                };
                let (a, b) = pair_of_one_shape(&call.outputs)?;
                call.outputs.swap(a, b);
            }
            Self::Number => change_number(node, rng),
            Self::LostReduction | Self::LostAddend => {
                let removed = nodes.remove(index);
                let from = removed.outputs().zip(removed.inputs()).collect();
                nodes[index..]
                    .iter_mut()
                    .for_each(|node| rename(node, &from));
            }
            Self::FreedEarly => {
                let taken = shared_input(nodes, index)?;
                mark_taken(&mut nodes[index], taken);
            }
            Self::TooEarly => {
                let writer = last_writer(nodes, index)?;
                let moved = nodes.remove(index);
                nodes.insert(writer, moved);
            }
            _ => return None,
        }
        Some(what)
    }

    /// Returns true if a node is a place for such a fault.
    fn fits(self, nodes: &[Node], index: usize) -> bool {
        let node = &nodes[index];
        let collective = node.collective.as_ref().filter(|of| !moves_zeros(of));
        let runs = collective.filter(|collective| collective.stage != Stage::Wait);
        match self {
            Self::Divisor => runs.is_some_and(|of| of.reduction == Some(ReduceOp::Mean)),
            Self::LostReduction => collective
                .is_some_and(|of| of.kind == CollectiveKind::AllReduce && of.stage == Stage::Whole),
            // Along another axis, a mean of equal values stays the same.
            Self::Axis => runs.is_some_and(|of| matches!(&*of.axis, "shard" | "replicate")),
            Self::Cut => {
                runs.is_some_and(|of| of.kind != CollectiveKind::AllReduce && of.parts.len() > 1)
            }
            Self::SwappedParts => match (&node.operation, collective) {
                (OperationIr::Custom(call), Some(of)) if of.stage == Stage::Whole => {
                    pair_of_one_shape(&call.outputs).is_some()
                }
                _ => false,
            },
            Self::Number => {
                let is_norm = node.name().contains("norm") && !node.name().contains("layer_norm");
                node.collective.is_none()
                    && node.scalars.is_empty()
                    && !is_norm
                    && numbers(node) > 0
            }
            Self::LostAddend => match &node.operation {
                OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) => {
                    op.lhs.shape == op.out.shape && is_read(nodes, op.out.id)
                }
                _ => false,
            },
            Self::FreedEarly => !node.is_drop() && shared_input(nodes, index).is_some(),
            Self::TooEarly => !node.is_drop() && last_writer(nodes, index).is_some(),
            _ => false,
        }
    }
}

/// Returns true for gradients of the keys' biases, which are zero: the biases add the same to every score of a query,
/// and softmax ignores that. Any operation on these gradients is right.
fn moves_zeros(collective: &Collective) -> bool {
    let mut parts = collective.parts.iter();
    parts.all(|part| part.path.ends_with("key.bias"))
}

/// Returns two tensors of one shape.
fn pair_of_one_shape(tensors: &[TensorIr]) -> Option<(usize, usize)> {
    let places = 0..tensors.len();
    places
        .clone()
        .flat_map(|a| places.clone().map(move |b| (a, b)))
        .find(|(a, b)| a < b && tensors[*a].shape == tensors[*b].shape)
}

fn is_read(nodes: &[Node], id: TensorId) -> bool {
    let mut readers = nodes.iter().filter(|node| !node.is_drop());
    readers.any(|node| node.inputs().any(|input| input == id))
}

/// Returns an input of a node that a later node also reads.
fn shared_input(nodes: &[Node], index: usize) -> Option<TensorId> {
    let inputs = nodes[index].inputs();
    let mut inputs = inputs.filter(|input| is_read(&nodes[index + 1..], *input));
    inputs.next()
}

fn last_writer(nodes: &[Node], index: usize) -> Option<usize> {
    let inputs: BTreeSet<TensorId> = nodes[index].inputs().collect();
    let writes = |node: &Node| node.outputs().any(|output| inputs.contains(&output));
    nodes[..index].iter().rposition(writes)
}

fn rename(node: &mut Node, from: &BTreeMap<TensorId, TensorId>) {
    struct Rename<'a>(&'a BTreeMap<TensorId, TensorId>);
    impl IrVisitorMut for Rename<'_> {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            if let Some(id) = self.0.get(&tensor.id) {
                tensor.id = *id;
            }
        }
    }
    node.operation.visit_mut(&mut Rename(from));
}

fn mark_taken(node: &mut Node, taken: TensorId) {
    struct Mark(TensorId);
    impl IrVisitorMut for Mark {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            if tensor.id == self.0 && tensor.status != TensorStatus::NotInit {
                tensor.status = TensorStatus::ReadWrite;
            }
        }
    }
    node.operation.visit_mut(&mut Mark(taken));
}

fn numbers(node: &Node) -> usize {
    let scalars = node.scalar_values();
    let is_float = |scalar: &&ScalarIr| matches!(scalar, ScalarIr::Float(_));
    scalars.iter().filter(is_float).count()
}

fn change_number(node: &mut Node, rng: &mut StdRng) {
    let mut scalars = node.scalar_values();
    let floats = scalars.iter_mut().filter_map(|scalar| match scalar {
        ScalarIr::Float(number) => Some(number),
        _ => None,
    });
    let mut floats: Vec<&mut f64> = floats.collect();
    let chosen = rng.random_range(0..floats.len());
    let number = &mut *floats[chosen];
    *number = if number.is_finite() {
        *number * 0.5 + 3.0
    } else {
        3.0
    };
    assert!(node.set_scalar_values(&scalars));
}

/// Puts a second sum after a reduction.
fn doubled(plan: &mut Graph, nodes: &mut Vec<Node>, rng: &mut StdRng) -> Option<String> {
    let places = nodes.iter().enumerate().filter(|(_, node)| {
        let collective = node.collective.as_ref();
        collective.is_some_and(|of| {
            of.kind == CollectiveKind::AllReduce && of.stage == Stage::Whole && !moves_zeros(of)
        })
    });
    let places: Vec<usize> = places.map(|(index, _)| index).collect();
    let index = *places.choose(rng)?;
    let mut again = nodes[index].clone();
    again.collective.as_mut()?.reduction = Some(ReduceOp::Sum);
    let mut fresh = BTreeMap::new();
    for output in nodes[index].outputs() {
        let value = plan.value(output)?.clone();
        let id = plan.add_value(value.shape, value.dtype, value.role);
        fresh.insert(output, id);
    }
    // The first writes what the second reads, and the second what all others read.
    let first: BTreeMap<TensorId, TensorId> = again
        .inputs()
        .zip(again.outputs())
        .map(|(input, output)| (input, fresh[&output]))
        .collect();
    rename(&mut nodes[index], &fresh);
    rename(&mut again, &first);
    mark_read_only(&mut again);
    let what = format!("node {index}, {}", again.name());
    nodes.insert(index + 1, again);
    Some(what)
}

fn mark_read_only(node: &mut Node) {
    struct Mark;
    impl IrVisitorMut for Mark {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            if tensor.status == TensorStatus::ReadWrite {
                tensor.status = TensorStatus::ReadOnly;
            }
        }
    }
    node.operation.visit_mut(&mut Mark);
}

fn wrong_operand(plan: &Graph, nodes: &mut [Node], rng: &mut StdRng) -> Option<String> {
    for _ in 0..100 {
        let index = rng.random_range(0..nodes.len());
        if nodes[index].is_drop() {
            continue;
        }
        let inputs: Vec<TensorId> = nodes[index].inputs().collect();
        let Some(input) = inputs.choose(rng).copied() else {
            continue;
        };
        let value = plan.value(input)?;
        let written = nodes[..index].iter().flat_map(Node::outputs);
        let given = plan.values().filter(|value| value.role.is_given());
        let others = written.chain(given.map(|value| value.id)).filter(|id| {
            plan.value(*id).is_some_and(|other| {
                other.shape == value.shape && other.dtype == value.dtype && *id != input
            })
        });
        let others: Vec<TensorId> = others.collect();
        let Some(other) = others.choose(rng) else {
            continue;
        };
        rename(&mut nodes[index], &[(input, *other)].into());
        let [input, other] = [input, *other].map(|id| id.value());
        let name = nodes[index].name();
        return Some(format!(
            "node {index}, {name}: %{other} in place of %{input}"
        ));
    }
    None
}

/// A plan with its trace and settings.
struct Case {
    name: String,
    traced: Graph,
    plan: Graph,
    mesh: Mesh,
}

fn clip() -> Clip {
    Clip::to(0.5)
}

fn cases() -> Vec<Case> {
    let settings = [
        ("none", Options::none()),
        ("default", Options::default()),
        ("clip", Options::default().clip_grad_norm(clip())),
        (
            "prefetch",
            Options::default().prefetch(true).kernels(false).fuse(false),
        ),
    ];
    let mut cases = Vec::new();
    for (model, traced) in traced(&AdamWConfig::new().build()) {
        if model == "cnn" {
            continue;
        }
        for (setting, options) in &settings {
            let mut add = |name: &str, mode: Mode, mesh: Mesh| {
                let plan = lower(traced.clone(), &mode.options(options.clone())).unwrap();
                cases.push(Case {
                    name: format!("{model}, {setting}, {name}"),
                    traced: traced.clone(),
                    plan,
                    mesh,
                });
            };
            for strategy in [Strategy::FullShard, Strategy::NoShard] {
                let world = ProcessGroup::fake(2, 0);
                let mesh = Mesh::line("data", 2).unwrap();
                let mode = Mode::data_parallel(world, strategy);
                add(&format!("{strategy}"), mode, mesh);
            }
            let axes = Mesh::new([("replicate", 2), ("shard", 2)]).unwrap();
            let mesh = ProcessMesh::new(&ProcessGroup::fake(4, 0), axes.clone()).unwrap();
            let mode = Mode::hybrid(mesh, "replicate", Strategy::FullShard).unwrap();
            add("hybrid", mode, axes);
        }
    }
    cases
}

/// Returns the number of refused mutants and of all mutants, by kind. Prints the mutants that were accepted.
fn refused(seeds: std::ops::Range<u64>) -> BTreeMap<Mutation, [usize; 2]> {
    let cases = cases();
    let mut counts: BTreeMap<Mutation, [usize; 2]> = BTreeMap::new();
    for seed in seeds {
        let mut rng = StdRng::seed_from_u64(seed);
        let (case, mutation, (mutant, what)) = loop {
            let case = cases.choose(&mut rng).unwrap();
            let mutation = *Mutation::ALL.choose(&mut rng).unwrap();
            // The first addend of a zero state is the whole sum.
            if mutation == Mutation::LostAddend && case.name.starts_with("lstm") {
                continue;
            }
            if let Some(found) = mutation.of(&case.plan, &mut rng) {
                break (case, mutation, found);
            }
        };
        let [caught, all] = counts.entry(mutation).or_default();
        *all += 1;
        match prove(&[case.traced.clone(), mutant], &case.mesh, Some(clip())) {
            Err(Error::NotCertified { .. }) => *caught += 1,
            other => println!(
                "seed {seed}: {}, {mutation:?} at {what}: {other:?}",
                case.name
            ),
        }
    }
    counts
}

/// `BURN_FSDP_LONG=1` makes 2,000 mutants.
#[test]
fn wrong_plans_are_refused() {
    let seeds = match std::env::var_os("BURN_FSDP_LONG") {
        None => 0..60,
        Some(_) => 1_000..3_000,
    };
    let counts = refused(seeds);
    println!("{counts:?}");
    for (mutation, [caught, all]) in counts {
        assert_eq!(caught, all, "{mutation:?}");
    }
}

/// A pass that does the same as another, with one fault.
#[derive(Debug)]
struct Faulty {
    pass: Box<dyn GraphTransform>,
    mutation: Mutation,
    seed: u64,
}

/// The error of a pass that has no place for its fault.
const NO_PLACE: &str = "no place for the fault";

impl GraphTransform for Faulty {
    fn id(&self) -> PassId {
        self.pass.id()
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        let graph = self.pass.transform(graph)?;
        let mut rng = StdRng::seed_from_u64(self.seed);
        let found = self.mutation.of(&graph, &mut rng);
        let found = found.ok_or_else(|| Error::Internal(NO_PLACE.to_owned()));
        Ok(found?.0)
    }
}

/// Returns consecutive passes for two ranks.
fn passes(strategy: Strategy) -> Vec<Box<dyn GraphTransform>> {
    let insert = InsertCollectives {
        num_ranks: 2,
        style: strategy.into(),
        axis: "data".into(),
        replicate: None,
        precision: Precision::default(),
        owners: Default::default(),
    };
    vec![
        Box::new(AssignUnits(Units::by_path())),
        Box::new(DeadCode),
        Box::new(CommonSubexpressions),
        Box::new(insert),
        Box::new(Deduplicate),
        Box::new(Bucket::default()),
        Box::new(EarlyOptimizer),
        Box::new(FusePointwise),
        Box::new(Liveness),
    ]
}

/// The faults that are wrong after every one of these passes. Before equal values are merged, another operand may be
/// the same, and a value that nothing reads may be anything.
const OF_PASSES: [Mutation; 9] = [
    Mutation::Divisor,
    Mutation::LostReduction,
    Mutation::DoubledReduction,
    Mutation::SwappedParts,
    Mutation::WrongOperand,
    Mutation::Number,
    Mutation::LostUpdate,
    Mutation::FreedEarly,
    Mutation::TooEarly,
];

/// The error names the faulty pass with a node, or without one if a result is wrong after the last node.
/// `BURN_FSDP_LONG=1` makes 200 mutants.
#[test]
fn the_faulty_pass_is_named() {
    const FIRST: usize = 2;
    let wanted = match std::env::var_os("BURN_FSDP_LONG") {
        None => 30,
        Some(_) => 200,
    };
    let mesh = Mesh::line("data", 2).unwrap();
    let models = traced(&AdamWConfig::new().build());
    let mut counts: BTreeMap<(String, Mutation), usize> = BTreeMap::new();
    let mut made = 0;
    for seed in 0.. {
        let mut rng = StdRng::seed_from_u64(seed);
        let (model, traced) = models.choose(&mut rng).unwrap();
        let strategies = [Strategy::FullShard, Strategy::NoShard];
        let mut passes = passes(*strategies.choose(&mut rng).unwrap());
        let last = rng.random_range(FIRST..passes.len());
        passes.truncate(last + 1);
        let pass = passes.pop().unwrap();
        let (expected, mutation) = (pass.id(), *OF_PASSES.choose(&mut rng).unwrap());
        if *model == "cnn" {
            continue;
        }
        let faulty = Faulty {
            pass,
            mutation,
            seed,
        };
        let mut stages = vec![traced.clone()];
        let all = passes.iter().map(Box::as_ref);
        let made_all = all
            .chain([&faulty as &dyn GraphTransform])
            .try_for_each(|pass| {
                stages.push(apply(pass, stages[stages.len() - 1].clone())?);
                Ok(())
            });
        match made_all {
            Ok(()) => {}
            Err(Error::Internal(reason)) if reason == NO_PLACE => continue,
            Err(error) => panic!("seed {seed}: {error}"),
        }
        match prove(&stages, &mesh, None) {
            Err(Error::NotCertified { pass, node, .. }) => {
                assert_eq!(pass, Some(expected), "seed {seed}: {model}, {mutation:?}");
                // Nothing reads the loss, and a value without its update is only read in the next step.
                let of_results = [Mutation::LostUpdate, Mutation::LostReduction];
                assert!(
                    node.is_some() || of_results.contains(&mutation),
                    "seed {seed}: {model}, {expected}, {mutation:?}"
                );
            }
            other => panic!("seed {seed}: {model}, {expected}, {mutation:?}: {other:?}"),
        }
        *counts.entry((expected.to_string(), mutation)).or_default() += 1;
        made += 1;
        if made == wanted {
            break;
        }
    }
    println!("{counts:?}");
}
