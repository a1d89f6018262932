//! Hybrid sharding: shards along one axis of a mesh, and copies of them along the other, compared with Burn's loop on
//! one rank.

use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::{Clip, Mesh, Norm};
use burn_fsdp_spmd::passes::Bucket;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{Error, Mode, Strategy, compile};

use crate::clipping::{assert_close, expected, sgd, trained};
use crate::compiled::seeded;
use crate::models::{Gpt, tokens};

const AXES: [[(&str, usize); 2]; 6] = [
    [("replicate", 2), ("shard", 2)],
    [("shard", 2), ("replicate", 2)],
    [("replicate", 2), ("shard", 3)],
    [("shard", 3), ("replicate", 2)],
    [("replicate", 1), ("shard", 2)],
    [("replicate", 3), ("shard", 1)],
];

fn mesh(world: &ProcessGroup, axes: [(&str, usize); 2]) -> Result<ProcessMesh, Error> {
    ProcessMesh::new(world, Mesh::new(axes)?).map_err(|source| Error::Collective {
        node: 0,
        source: std::sync::Arc::new(source),
    })
}

#[test]
fn copies_of_shards_train_like_one_rank() {
    let _guard = seeded();
    // Small enough to put the gradients of a unit in several buckets, and their shards in others.
    let small = Bucket {
        first_bytes: 700,
        cap_bytes: 1500,
    };
    let clipped = Options::default().clip_grad_norm(Clip::to(0.5));
    let settings = [
        (1, f64::INFINITY, Options::default()),
        (
            1,
            f64::INFINITY,
            Options::default().bucket(small).prefetch(true),
        ),
        (1, f64::INFINITY, Options::none()),
        (
            1,
            0.5,
            clipped.clone().optimizer(OptimizerPlace::InNextForward),
        ),
        (3, 0.5, clipped.bucket(small)),
    ];
    for (index, (num_batches, max_norm, options)) in settings.into_iter().enumerate() {
        let one = expected(num_batches, max_norm, Norm::default());
        for axes in AXES {
            for strategy in [Strategy::FullShard, Strategy::ShardGradOp] {
                if index > 0 && strategy == Strategy::ShardGradOp {
                    continue;
                }
                let with = options.clone();
                let mode = move |world: ProcessGroup| {
                    let (size, rank) = (world.size(), world.rank());
                    let mode = Mode::hybrid(mesh(&world, axes)?, "replicate", strategy)?;
                    Ok((mode.options(with.clone()), size, rank))
                };
                let num_ranks = axes.iter().map(|axis| axis.1).product();
                let got = trained(num_ranks, num_batches, mode);
                let what = format!("{num_batches} of {strategy} on {axes:?}, {options:?}");
                assert_close(&what, &got, &one);
            }
        }
    }
}

#[test]
fn gradients_are_reduced_to_shards_and_then_over_replicas() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = burn::tensor::Device::flex();
        let mesh = mesh(&world, [("replicate", 2), ("shard", 2)])?;
        let mode = Mode::hybrid(mesh.clone(), "replicate", Strategy::FullShard)?;
        let mut step = compile(Gpt::new, Gpt::loss, sgd().build(), mode)?;
        let batch = tokens(0, world.rank(), 1, &device);
        step.step(1e-2, &batch)?;
        let along = |axis: &str| mesh.along(axis).expect("the mesh has it").counts();
        let before = [along("shard"), along("replicate")];
        step.step(1e-2, &batch)?;
        let after = [along("shard"), along("replicate")];
        let units = step.graph().expect("it has run").parameters().len();
        let of = |axis: usize, kind| {
            let (after, before) = (after[axis].of(kind), before[axis].of(kind));
            [
                after.operations - before.operations,
                after.bytes - before.bytes,
            ]
        };
        assert!(units > 0);
        Ok([
            of(0, OperationKind::AllGather),
            of(0, OperationKind::ReduceScatter),
            of(0, OperationKind::AllReduce),
            of(1, OperationKind::AllGather),
            of(1, OperationKind::ReduceScatter),
            of(1, OperationKind::AllReduce),
        ])
    };
    let seen = launch(LaunchConfig::new(4), body).unwrap();
    let parameters = {
        let mut step = compile(Gpt::new, Gpt::loss, sgd().build(), Mode::single()).unwrap();
        let specs = step.parameters().to_vec();
        let shards = specs.iter().map(|spec| {
            let elements: usize = step.parameter(&spec.path).unwrap().num_elements();
            (elements, elements.div_ceil(2))
        });
        shards.fold((0, 0), |sum, own| (sum.0 + own.0, sum.1 + own.1))
    };
    let (whole, shards) = (parameters.0 as u64 * 4, parameters.1 as u64 * 4);
    for counts in seen {
        let [gathers, scatters, losses, no_gathers, no_scatters, means] = counts;
        assert_eq!(scatters[1], whole, "gradients are scattered once");
        assert_eq!(losses, [1, 4], "the loss along the axis of the shards");
        assert_eq!((no_gathers, no_scatters), ([0, 0], [0, 0]));
        // One bucket of all shards and the loss, over the copies.
        assert_eq!(means[1], shards + 4);
        assert!(means[0] <= 2 && gathers[0] > scatters[0]);
    }
}

#[test]
fn unsupported_meshes_and_strategies_are_rejected() {
    launch(
        LaunchConfig::new(2),
        |world: ProcessGroup| -> Result<_, Error> {
            let two = mesh(&world, [("replicate", 2), ("shard", 1)])?;
            let told = |mode: Result<Mode, Error>| mode.expect_err("refused").to_string();
            let none = told(Mode::hybrid(two.clone(), "replicate", Strategy::NoShard));
            assert!(none.contains("no-shard"), "{none}");
            let axis = told(Mode::hybrid(two, "copies", Strategy::FullShard));
            assert!(axis.contains("copies"), "{axis}");
            let line = ProcessMesh::new(&world, Mesh::line("replicate", 2)?).expect("it fits");
            let line = told(Mode::hybrid(line, "replicate", Strategy::FullShard));
            assert!(line.contains("1 and full-shard"), "{line}");
            Ok(())
        },
    )
    .unwrap();
}
