//! From one cut to another: the results, the bytes that travel, and the operations.

use burn::backend::Flex;
use burn::tensor::{DType, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Placement::{Replicate, Shard};
use burn_fsdp_mesh::{Layout, Mesh};
use burn_fsdp_spmd::graph::{CollectiveKind, Graph, Node, Parameter, Phase, Role, Update};
use burn_fsdp_spmd::passes::{Liveness, Pipeline, Split};
use burn_fsdp_spmd::place::ExpandPlacements;
use burn_fsdp_spmd::run::Executor;
use burn_fsdp_spmd::trace::StepScalars;
use burn_fsdp_spmd::{Error, Expand};
use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, TensorId};

/// An axis of the mesh, and the dims along which it cuts `state` and `input`.
#[derive(Debug, Clone, Copy)]
struct Axis {
    name: &'static str,
    num_ranks: usize,
    state: Option<usize>,
    input: Option<usize>,
}

/// Returns a graph that turns `state` into `state + input`, on one rank.
fn sum(shape: &[usize]) -> (Graph, TensorId, TensorId) {
    let mut graph = Graph::new();
    let dtype = DType::F32;
    let state = graph.add_value(shape, dtype, Role::Parameter("state".into()));
    let input = graph.add_value(shape, dtype, Role::Input("input".into()));
    let sum = graph.add_value(shape, dtype, Role::Temporary);
    graph.add_input(input);
    graph.parameters_mut().push(Parameter {
        path: "state".into(),
        value: state,
        shape: shape.to_vec(),
        dtype,
        layout: Layout::one_rank(),
        gradient: None,
        states: Vec::new(),
        whole_states: Vec::new(),
        state_format: None,
        is_buffer: false,
    });
    let add = NumericOperationIr::Add(BinaryOpIr {
        lhs: graph.read(state).unwrap(),
        rhs: graph.read(input).unwrap(),
        out: graph.write(sum).unwrap(),
    });
    let add = OperationIr::NumericFloat(dtype, add);
    graph.push(Node::new(add, Phase::Forward));
    graph.updates_mut().push(Update {
        into: state,
        from: sum,
    });
    (graph, state, input)
}

/// Returns the same graph for every rank of a mesh.
fn placed(shape: &[usize], axes: &[Axis], is_split: bool) -> (Graph, TensorId, TensorId) {
    let (graph, state, input) = sum(shape);
    let placement = |dim: Option<usize>| dim.map_or(Replicate, Shard);
    let expand = axes.iter().fold(Expand::new(), |expand, axis| {
        expand
            .parameter("state", axis.name, placement(axis.state))
            .input("input", axis.name, placement(axis.input))
    });
    let mesh = Mesh::new(axes.iter().map(|axis| (axis.name, axis.num_ranks))).unwrap();
    let mut pipeline = Pipeline::new()
        .verified()
        .then(ExpandPlacements::new(expand, mesh));
    if is_split {
        pipeline = pipeline.then(Split);
    }
    let graph = pipeline.then(Liveness).run(graph).unwrap();
    (graph, state, input)
}

fn whole(shape: [usize; 3], times: i64) -> Tensor<3> {
    let num_elements: usize = shape.iter().product();
    let values = (0..num_elements as i64).map(|index| (index * times % 1009) as f32);
    let data = TensorData::new(values.collect::<Vec<_>>(), shape);
    Tensor::from_data(data, &burn::tensor::Device::flex())
}

/// Returns the part of a rank with these numbers on the axes.
fn part(whole: Tensor<3>, cuts: &[(Option<usize>, usize, usize)]) -> TensorData {
    let mut part = whole;
    for (dim, num_ranks, rank) in cuts {
        if let Some(dim) = dim {
            part = part.chunk(*num_ranks, *dim).swap_remove(*rank);
        }
    }
    part.into_data()
}

/// Runs the sum on all ranks, and checks that each has its part of it to the bit. Returns for each axis the operations
/// that one rank started on it: the number of all-to-alls, the bytes of their whole tensors, and the number of all
/// other operations.
fn started(shape: [usize; 3], axes: &[Axis], is_split: bool) -> Vec<[u64; 3]> {
    let axes = axes.to_vec();
    let num_ranks = axes.iter().map(|axis| axis.num_ranks).product();
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let (graph, state, input) = placed(&shape, &axes, is_split);
        let layout = Mesh::new(axes.iter().map(|axis| (axis.name, axis.num_ranks)))?;
        let mesh = ProcessMesh::new(&world, layout).unwrap();
        let along = |axis: &Axis| mesh.along(axis.name).unwrap().clone();
        let cuts = |of: fn(&Axis) -> Option<usize>| -> Vec<_> {
            let cut = |axis: &Axis| (of(axis), axis.num_ranks, along(axis).rank());
            axes.iter().map(cut).collect()
        };
        let groups = axes.iter().map(|axis| (axis.name.into(), along(axis)));
        let mut executor = Executor::<Flex>::new(Default::default(), world);
        executor = executor.axes(groups.collect::<Vec<_>>());
        executor.set(state, part(whole(shape, 7), &cuts(|axis| axis.state)));
        executor.set(input, part(whole(shape, 13), &cuts(|axis| axis.input)));
        let counts = || -> Vec<_> { axes.iter().map(|axis| along(axis).counts()).collect() };
        let before = counts();
        executor.run(&graph, &StepScalars::default(), None)?;
        let after = counts();
        let expected = whole(shape, 7) + whole(shape, 13);
        let expected = part(expected, &cuts(|axis| axis.state));
        assert_eq!(executor.get(state)?, expected, "{axes:?} {graph}");
        let counts = after.iter().zip(&before).map(|(after, before)| {
            let counts = after.since(before);
            let crossed = counts.of(OperationKind::AllToAll);
            let others = counts.total().operations - crossed.operations;
            [crossed.operations, crossed.bytes, others]
        });
        Ok(counts.collect::<Vec<_>>())
    };
    let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    results.swap_remove(0)
}

const SHAPE: [usize; 3] = [12, 24, 36];
const NUM_BYTES: u64 = 12 * 24 * 36 * 4;

#[test]
fn values_move_between_dims_in_one_operation() {
    for num_ranks in [2, 3, 4] {
        for (state, input) in [(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)] {
            // One operand moves to the other's cut. If the state moves, the sum returns.
            let operations = if state < input { 1 } else { 2 };
            let expected = [operations, operations * NUM_BYTES, 0];
            let axis = Axis {
                name: "line",
                num_ranks,
                state: Some(state),
                input: Some(input),
            };
            for is_split in [false, true] {
                let got = started(SHAPE, &[axis], is_split);
                assert_eq!(got, [expected], "{axis:?}");
            }
        }
    }
}

#[test]
fn dims_of_one_element_make_no_copies() {
    for (shape, state, input) in [
        ([1, 12, 12], 1, 2),
        ([12, 1, 12], 0, 2),
        ([12, 12, 1], 1, 0),
    ] {
        let axis = Axis {
            name: "line",
            num_ranks: 3,
            state: Some(state),
            input: Some(input),
        };
        let operations = if state < input { 1 } else { 2 };
        let expected = [operations, operations * 144 * 4, 0];
        assert_eq!(started(shape, &[axis], false), [expected], "{shape:?}");
    }
}

#[test]
fn another_axis_may_cut_other_dims() {
    let axes = |state, input, other_state, other_input| {
        [
            ("one", 2, state, input),
            ("two", 3, other_state, other_input),
        ]
        .map(|(name, num_ranks, state, input)| Axis {
            name,
            num_ranks,
            state,
            input,
        })
    };
    // Each rank of the other axis has a third of the value, and moves that.
    let third = NUM_BYTES / 3;
    let got = started(SHAPE, &axes(Some(0), Some(2), Some(1), Some(1)), false);
    assert_eq!(got, [[1, third, 0], [0, 0, 0]]);
    // Dims that exchange axes would be cut twice in between. They are gathered and cut anew.
    let got = started(SHAPE, &axes(Some(0), Some(1), Some(1), Some(0)), false);
    assert!(
        got.iter().all(|axis| axis[0] == 0 && axis[2] > 0),
        "{got:?}"
    );
}

#[test]
fn the_graph_has_no_gather_and_no_slice() {
    let axis = Axis {
        name: "line",
        num_ranks: 4,
        state: Some(0),
        input: Some(1),
    };
    let (graph, ..) = placed(&SHAPE, &[axis], false);
    let kinds: Vec<_> = graph.collectives().map(|(_, c)| c.kind).collect();
    assert_eq!(kinds, [CollectiveKind::AllToAll], "{graph}");
    assert!(graph.nodes().iter().all(|node| node.shift.is_none()));
}
