//! The wrapper form: the same machinery, the same names, the same values.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::MuonConfig;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp_collectives::{CommCounter, OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Agreement, BufferSync, Clip, FullyShardedDataParallel, Precision, ShardPolicy, WriteBack,
    num_params, order, parameter_paths, params_with_gradient,
};

use super::bench::{
    Case, Outcome, assert_close, build, device, joined, on_ranks, optimizer, params, plainly,
    seeded_by_rank,
};
use super::nets::{Block, MLP, Mlp, input};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn wrapped(
    world: &burn_fsdp_collectives::ProcessGroup,
    device: &Device,
) -> Result<FullyShardedDataParallel<Mlp>, burn_fsdp_shard::Error> {
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let model = seeded_by_rank(Mlp::new(device), world.rank());
    FullyShardedDataParallel::new(model, &mesh, blocks())
}

#[test]
fn the_wrapper_trains_as_one_rank_does() {
    for ranks in 1..=4 {
        let want = plainly(MLP, ranks, 10);
        let outcomes = on_ranks(ranks, |world| {
            let device = device();
            let mut model = wrapped(&world, &device)?;
            let mut optim = optimizer();
            model.check_elementwise(&optim)?;
            model.check_agreement(Agreement::Parameters)?;
            let mut losses = Vec::new();
            for step in 0..10 {
                let loss = model.loss(world.rank(), step, &device);
                losses.push(loss.clone().into_scalar::<f32>());
                let gradients = model.backward(loss)?;
                let clipped = model.clip_grad_norm(gradients, Clip::to(1e9))?;
                model = optim.step(1e-2, model, clipped.gradients);
            }
            let model = model.sync_buffers(BufferSync::Broadcast)?;
            let record = model.into_inner().into_record();
            let params = params(&Mlp::new(&device).load_record(record));
            Ok(Outcome { losses, params })
        });
        assert_close(&joined(&outcomes), &want, 1e-5);
    }
}

#[test]
fn wrapper_and_verb_issue_the_same_operations_in_the_same_order() {
    on_ranks(2, |world| {
        let device = device();
        let mut model = wrapped(&world, &device)?;
        let counter = CommCounter::new([&world]);
        let gradients = model.backward(model.loss(0, 0, &device))?;
        model = optimizer().step(1e-2, model, gradients);
        let of_wrapper = counter.counts();
        let verb = build(MLP, &world, &device, blocks())?;
        let counter = CommCounter::new([&world]);
        burn_fsdp_shard::backward(verb.loss(0, 0, &device), &verb)?;
        assert_eq!(of_wrapper, counter.counts());
        assert_eq!(order(&model)?, order(&verb)?);
        assert_eq!(of_wrapper.of(OperationKind::AllReduce).operations, 1);
        Ok(())
    });
}

#[test]
fn names_sizes_and_records_are_the_modules_own() {
    on_ranks(2, |world| {
        let device = device();
        let model = wrapped(&world, &device)?;
        let plain = Mlp::new(&device);
        assert_eq!(parameter_paths(&model), parameter_paths(&plain));
        assert_eq!(model.num_params(), plain.num_params());
        assert_eq!(num_params(&model), plain.num_params());
        let record = model.clone().into_record();
        let loaded = Mlp::new(&device).load_record(record);
        let whole = super::bench::whole_params(plain, model.module());
        assert_eq!(params(&loaded), whole);
        let evaluated = model.valid().loss(0, 0, &device).into_scalar::<f32>();
        let loss = model.loss(0, 0, &device);
        assert_eq!(evaluated, loss.clone().into_scalar::<f32>());
        model.backward(loss)?;
        Ok(())
    });
}

#[test]
fn the_wrapper_prints_its_configuration() {
    let texts = on_ranks(2, |world| Ok(wrapped(&world, &device())?.to_string()));
    let text = &texts[1];
    for part in [
        "rank 1 of 2 on axis \"shard\"",
        "FullShard",
        "flat shards in f32, computed in f32, reduced in f32",
        "0 units prefetched",
        "blocks.2",
        "kept",
        "dropped",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // The second rank has the smaller part of an odd number of elements.
    let lines = |text: &str| -> Vec<String> {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines().skip(2).map(words).collect()
    };
    let of_ranks = [[632, 844], [624, 832]];
    for (text, [root, block]) in texts.iter().zip(of_ranks) {
        let mut want = vec![format!("root 292 1.1 KiB {root} B kept")];
        for index in 0..3 {
            want.push(format!("blocks.{index} 367 1.2 KiB {block} B dropped"));
        }
        let held = (root + 3 * block) as f64 / 1024.0;
        want.push(format!(
            "all 1393 {held:.1} KiB on 2 ranks; at most 4.6 KiB unsharded at once"
        ));
        assert_eq!(lines(text), want);
    }
    let texts = on_ranks(2, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let precision = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
        let policy = ShardPolicy::new().precision(precision);
        let net = (MLP.build)(&device());
        Ok(FullyShardedDataParallel::new(net, &mesh, policy)?.to_string())
    });
    let types = "flat shards in f32, computed in bf16, reduced in f32";
    assert!(texts[0].contains(types), "{}", texts[0]);
}

#[test]
fn wrapping_twice_and_optimizers_of_whole_tensors_are_refused() {
    on_ranks(2, |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let model = wrapped(&world, &device)?;
        let refused = model.check_elementwise(&MuonConfig::new().init());
        let message = refused.expect_err("whole tensors").to_string();
        assert!(message.contains("`embed.weight`"), "{message}");
        let twice = FullyShardedDataParallel::new(model, &mesh, ShardPolicy::new());
        let message = twice.expect_err("sharded already").to_string();
        assert!(
            message.contains("already belongs to a unit, such as `root`"),
            "{message}"
        );
        Ok(())
    });
}

#[test]
fn summoned_parameters_are_changed_through_the_wrapper() {
    on_ranks(3, |world| {
        let device = device();
        let model = wrapped(&world, &device)?;
        let model = model.summon_full_params(WriteBack::Keep, |mut full| {
            full.head.weight = Param::from_tensor(full.head.weight.val().zeros_like());
            full
        })?;
        let mut seen = Vec::new();
        model.summon_full_params(WriteBack::Discard, |full| {
            seen = full
                .head
                .weight
                .val()
                .into_data()
                .try_to_vec::<f32>()
                .expect("f32");
            full
        })?;
        assert_eq!(seen, vec![0.0; 15 * 7]);
        Ok(())
    });
}

/// Its blocks are wrapped one by one, before the module is.
#[derive(Module, Debug)]
struct Nested {
    blocks: Vec<FullyShardedDataParallel<Block>>,
    head: Linear,
}

impl Nested {
    fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x = input([2, 4, 15], rank, step, device);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(x).powf_scalar(2.0).mean()
    }
}

/// The same without wrappers.
#[derive(Module, Debug)]
struct Plain {
    blocks: Vec<Block>,
    head: Linear,
}

fn plain(device: &Device) -> Plain {
    Plain {
        blocks: (0..2).map(|_| Mlp::block(device)).collect(),
        head: LinearConfig::new(15, 3).init(device),
    }
}

const PLAIN: Case<Plain> = Case {
    build: plain,
    loss: |model, rank, step, device| {
        let x = input([2, 4, 15], rank, step, device);
        let x = model.blocks.iter().fold(x, |x, block| block.forward(x));
        model.head.forward(x).powf_scalar(2.0).mean()
    },
};

#[test]
fn outer_wrappers_shard_what_their_children_left() {
    let outcomes = on_ranks(2, |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let Plain { blocks, head } = seeded_by_rank(plain(&device), world.rank());
        let child = |block| {
            let policy = ShardPolicy::new().reshard_root(true);
            FullyShardedDataParallel::new(block, &mesh, policy)
        };
        let blocks = blocks
            .into_iter()
            .map(child)
            .collect::<Result<Vec<_>, _>>()?;
        let nested = Nested { blocks, head };
        let paths = parameter_paths(&nested);
        assert!(
            paths.contains(&"blocks.1.up.weight".to_owned()),
            "{paths:?}"
        );
        assert!(
            nested.to_string().contains("FullyShardedDataParallel"),
            "{nested}"
        );
        let mut model = FullyShardedDataParallel::new(nested, &mesh, ShardPolicy::new())?;
        assert_eq!(parameter_paths(&model), paths);
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..3 {
            let loss = model.loss(world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = model.backward(loss)?;
            assert_eq!(params_with_gradient(&model, &gradients).len(), paths.len());
            model = optim.step(1e-2, model, gradients);
        }
        let units = order(&model)?.to_string();
        assert!(units.contains("unshard blocks.0"), "{units}");
        let record = model.into_record();
        let params = params(&plain(&device).load_record(record));
        Ok(Outcome { losses, params })
    });
    assert_close(&joined(&outcomes), &plainly(PLAIN, 2, 3), 1e-5);
}

/// The batches of the other half of the ranks.
const OTHERS: Case<Mlp> = Case {
    build: Mlp::new,
    loss: |model, rank, step, device| model.loss(rank + 2, step, device),
};

#[test]
fn a_part_of_the_ranks_may_shard_among_themselves() {
    let outcomes = on_ranks(4, |world| {
        let device = device();
        let half = world.split(world.rank() / 2, world.rank(), "half")?;
        let counter = CommCounter::new([&world]);
        let mut model = wrapped(&half, &device)?;
        assert!(model.to_string().contains("of 2 on axis"), "{model}");
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..3 {
            let loss = model.loss(world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = model.backward(loss)?;
            model = optim.step(1e-2, model, gradients);
        }
        counter.expect(&[]);
        let record = model.into_inner().into_record();
        let params = params(&Mlp::new(&device).load_record(record));
        Ok(Outcome { losses, params })
    });
    for (half, case) in outcomes.chunks(2).zip([MLP, OTHERS]) {
        assert_close(&joined(half), &plainly(case, 2, 3), 1e-5);
    }
}
