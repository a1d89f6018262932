//! Low-rank adapters on sharded weights, compared with Burn's own on one rank.

use burn::module::{Lora, LoraAdapter, Module, ModuleMapper, Param, ParamGroup, Reparameterizer};
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, DType, Device, FloatDType, Tensor, TensorData};
use burn_fsdp_collectives::{Mesh, OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_shard::{
    Clip, Error, FullyShardedDataParallel, Precision, ShardPolicy, Strategy, WriteBack, backward,
    clip_grad_norm, fully_shard, into_record, num_params, parameter_paths, params_with_gradient,
    recompute, summon_full_params,
};

use super::bench::{
    Case, Outcome, SEED, Way, assert_close, assert_same, build, device, joined, on_ranks,
    optimizer, params, plain_device, seeded, since, train_by, trained_plainly,
};
use super::nets::{Block, Mlp, tokens};

/// The head is in rows. Burn does not load a record of its own module if a weight in columns is already initialized, as
/// `apply_lora` leaves it.
const MLP: Case<Mlp> = Case {
    build: in_rows,
    loss: Mlp::loss,
};

pub(super) fn in_rows(device: &Device) -> Mlp {
    Mlp {
        head: LinearConfig::new(15, 7).init(device),
        ..Mlp::new(device)
    }
}

pub(super) fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// All matrices of the blocks: 9 of 7 x 15 and the like, of 12.
pub(super) fn adapters() -> Lora {
    Lora::new(2, 3.0).set_param_group(ParamGroup::from_predicate("blocks"))
}

/// A mapper that gives factors the same values in every run, none of them zero.
#[derive(Default)]
pub(super) struct Factors {
    path: Vec<String>,
    number: usize,
}

impl ModuleMapper for Factors {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.path.iter().any(|name| name == "lora") {
            return param;
        }
        self.number += 1;
        let number = self.number;
        param.map(|old| {
            let len = old.shape().num_elements();
            let values = (0..len).map(|i| ((i * 5 + number * 3) % 11) as f32 / 20.0 - 0.23);
            let values = TensorData::new(values.collect(), old.shape());
            Tensor::from_data(values, (&old.device(), old.dtype())).require_grad()
        })
    }
}

/// Burn's module with adapters, on one rank.
pub(super) fn plain(device: &Device, lora: Lora) -> Mlp {
    let model = seeded(in_rows(device), SEED).apply_lora(lora);
    model.map(&mut Factors::default())
}

/// Burn's adapters in several groups. The last group that matches a parameter adapts it.
#[derive(Clone)]
struct Groups(Vec<Lora>);

impl Reparameterizer for Groups {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let mut groups = self.0.iter_mut().rev();
        match groups.find(|lora| lora.param_group.matches(&param.id, Some(path))) {
            Some(lora) => lora.reparameterize(path, param),
            None => (param.set_require_grad(false), None),
        }
    }
}

/// The parameters after `steps` steps of plain Burn on the joined batch.
pub(super) fn plainly(ranks: usize, steps: usize) -> Outcome {
    let device = plain_device().autodiff();
    trained_plainly(
        plain(&device, adapters()),
        Mlp::loss,
        &device,
        [ranks, steps],
    )
}

/// The sharded module with the same values.
fn sharded(world: &ProcessGroup, policy: ShardPolicy) -> Result<Mlp, Error> {
    let model = build(MLP, world, &device(), policy.lora(adapters()))?;
    Ok(model.load_record(plain(&device(), adapters()).into_record()))
}

/// The parameters of a sharded module, under the names of Burn's own adapted module.
pub(super) fn outcome(model: &Mlp, losses: Vec<f32>) -> Outcome {
    let plain = plain(&device(), adapters());
    let params = params(&plain.load_record(model.clone().into_record()));
    Outcome { losses, params }
}

fn trained(
    ranks: usize,
    steps: usize,
    policy: &ShardPolicy,
    loss: fn(&Mlp, usize, usize, &Device) -> Tensor<1>,
) -> Outcome {
    let policy = policy.clone();
    joined(&on_ranks(ranks, move |world| {
        let mut model = sharded(&world, policy.clone())?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..steps {
            let loss = loss(&model, world.rank(), step, &device());
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(outcome(&model, losses))
    }))
}

#[test]
fn adapters_match_unsharded_training() {
    for ranks in 1..=4 {
        let want = plainly(ranks, 4);
        let tolerance = if ranks == 1 { 0.0 } else { 1e-5 };
        for policy in [
            blocks(),
            ShardPolicy::new(),
            ShardPolicy::new().units(["**.up", "blocks.*"]),
            blocks().reshard_root(true).prefetch(2),
            blocks().strategy(Strategy::ShardGradOp),
            blocks().strategy(Strategy::NoShard),
            blocks().whole_below(40),
            blocks().one_owner(["**"]),
            blocks().one_owner(["**.lora"]),
        ] {
            let got = trained(ranks, 4, &policy, Mlp::loss);
            assert_close(&got, &want, tolerance);
        }
    }
}

/// All matrices of the blocks, except that three have another rank and scale.
#[test]
fn groups_have_ranks_and_scales_of_their_own() {
    let groups = || {
        let up = ParamGroup::from_predicate("up");
        Groups(vec![adapters(), Lora::new(5, 1.5).set_param_group(up)])
    };
    let adapted = move |device: &Device| {
        let model = seeded(in_rows(device), SEED).apply_reparameterization(groups());
        model.map(&mut Factors::default())
    };
    for ranks in 1..=3 {
        let device = plain_device().autodiff();
        let mut model = adapted(&device);
        let mut optim = optimizer();
        for step in 0..3 {
            let parts = (0..ranks).map(|rank| model.loss(rank, step, &device));
            let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
            let gradients = sum.div_scalar(ranks as f32).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optim.step(1e-2, model, gradients);
        }
        let want = Outcome {
            losses: Vec::new(),
            params: params(&model),
        };
        let ranks_of = |rank: usize| {
            let of = |size: usize| 3 * size * rank;
            of(15) + of(7)
        };
        let got = on_ranks(ranks, move |world| {
            let policy = groups().0.into_iter().fold(blocks(), ShardPolicy::lora);
            let model = build(MLP, &world, &super::bench::device(), policy)?;
            let bare = build(MLP, &world, &super::bench::device(), blocks())?;
            // Three matrices of rank 5, and six of rank 2.
            let added = ranks_of(5) + 2 * ranks_of(2);
            assert_eq!(num_params(&model), num_params(&bare) + added);
            let values = adapted(&super::bench::device()).into_record();
            let mut model = model.load_record(values);
            let mut optim = optimizer();
            for step in 0..3 {
                let loss = model.loss(world.rank(), step, &super::bench::device());
                let gradients = backward(loss, &model)?;
                model = optim.step(1e-2, model, gradients);
            }
            let plain = adapted(&super::bench::device());
            let params = params(&plain.load_record(model.into_record()));
            let losses = Vec::new();
            Ok(Outcome { losses, params })
        });
        let tolerance = if ranks == 1 { 0.0 } else { 1e-5 };
        assert_close(&joined(&got), &want, tolerance);
    }
}

/// Adapted weights are also created in recomputed regions.
#[test]
fn adapters_train_in_recomputed_regions() {
    fn loss(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
        for block in &model.blocks {
            x = recompute(block, x, Block::forward);
        }
        let x = model.head.forward(model.norm.forward(x));
        x.powf_scalar(2.0).mean()
    }
    for ranks in 1..=3 {
        assert_close(
            &trained(ranks, 3, &blocks(), loss),
            &plainly(ranks, 3),
            1e-5,
        );
    }
}

/// Factors step in backward, also if their frozen weight belongs to a unit that has no other trained parameter.
#[test]
fn factors_step_in_backward_as_after_it() {
    for ranks in 1..=3 {
        let run = |way: Way| {
            joined(&on_ranks(ranks, move |world| {
                let model = sharded(&world, blocks())?;
                let (rank, device) = (world.rank(), device());
                let plain = plain(&device, adapters());
                train_by(way, model, optimizer(), 4, plain, |model, step| {
                    model.loss(rank, step, &device)
                })
            }))
        };
        let [got, want] = [Way::InBackward, Way::AfterBackward].map(run);
        assert_same(&got, &want, "factors");
    }
}

#[test]
fn replicas_and_hybrids_train_adapters() {
    let want = plainly(4, 3);
    let got = on_ranks(4, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::new([("replicate", 2), ("shard", 2)])?)?;
        let model = seeded(in_rows(&device()), SEED);
        let policy = blocks().replicate_axis("replicate").lora(adapters());
        let model = fully_shard(model, &mesh, policy)?;
        let mut model = model.load_record(plain(&device(), adapters()).into_record());
        let mut optim = optimizer();
        for step in 0..3 {
            let loss = model.loss(world.rank(), step, &device());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(outcome(&model, Vec::new()))
    });
    let want = Outcome {
        losses: Vec::new(),
        ..want
    };
    assert_close(&joined(&got), &want, 1e-5);
}

/// Frozen weights send no gradient: only the factors' bytes are reduced, and a step gathers each unit twice.
#[test]
fn frozen_weights_are_gathered_and_never_reduced() {
    for ranks in 2..=4 {
        on_ranks(ranks, move |world| {
            let model = sharded(&world, blocks().reshard_root(true).prefetch(0))?;
            let before = world.counts();
            let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
            let counts = since(&world, &before);
            let trained = params_with_gradient(&model, &gradients);
            assert_eq!(trained.len(), 18, "{trained:?}");
            assert!(
                trained.iter().all(|path| path.contains(".lora.")),
                "{trained:?}"
            );
            // Three blocks have something to reduce, the root has nothing; it is used twice in a forward.
            let of = |kind| counts.of(kind).operations;
            assert_eq!(of(OperationKind::ReduceScatter), 3);
            assert_eq!(of(OperationKind::AllReduce), 0);
            let factors = 4 * 3 * (15 * 2 + 2 * 7);
            assert_eq!(counts.of(OperationKind::ReduceScatter).bytes, 3 * factors);
            let block = 4 * (15 * 7 + 15 * 7 + 7 * 15);
            let root = 4 * (11 * 15 + 15 * 7);
            // The root is used at both ends of forward, and by the head in backward.
            let gathered = 3 * root + 2 * 3 * (block + factors);
            assert_eq!(counts.of(OperationKind::AllGather).bytes, gathered);
            Ok(())
        });
    }
}

#[test]
fn a_new_adapter_adds_nothing_and_all_else_is_frozen() {
    on_ranks(2, |world| {
        let policy = blocks().lora(Lora::new(3, 6.0));
        let adapted = build(MLP, &world, &device(), policy)?;
        let bare = build(MLP, &world, &device(), blocks())?;
        let loss = |model: &Mlp| model.loss(0, 0, &device()).into_scalar::<f32>();
        assert_eq!(loss(&adapted), loss(&bare));
        let paths = parameter_paths(&adapted);
        let factors = paths.iter().filter(|path| path.contains(".lora."));
        // The factors of the embedding, the head and nine matrices.
        assert_eq!(factors.count(), 22);
        let added = 3 * ((11 + 15) + 9 * (7 + 15) + (15 + 7));
        assert_eq!(num_params(&adapted), num_params(&bare) + added);
        // Drawn values are rank 0's.
        let record =
            params(&plain(&device(), Lora::new(3, 6.0)).load_record(into_record(adapted)?));
        let a: Vec<_> = record
            .iter()
            .filter(|(path, _)| path.ends_with("lora.a"))
            .collect();
        let b: Vec<_> = record
            .iter()
            .filter(|(path, _)| path.ends_with("lora.b"))
            .collect();
        let of_a: Vec<f32> = a.iter().flat_map(|(_, values)| values.clone()).collect();
        assert!(
            b.iter()
                .all(|(_, values)| values.iter().all(|value| *value == 0.0))
        );
        let mean_square = of_a.iter().map(|value| value * value).sum::<f32>() / of_a.len() as f32;
        assert!(
            (mean_square.sqrt() - 1.0 / 3.0).abs() < 0.05,
            "{mean_square}"
        );
        Ok(of_a)
    })
    .windows(2)
    .for_each(|pair| assert_eq!(pair[0], pair[1]));
}

/// Merged, whole and without autodiff; and as one of Burn's modules.
#[test]
fn adapters_are_merged() {
    let device = plain_device().autodiff();
    let adapted = plain(&device, adapters());
    let want = params(&adapted.clone().materialize());
    let loss = adapted.loss(0, 0, &device).into_scalar::<f32>();
    for ranks in 1..=3 {
        for (merged, summoned, read) in on_ranks(ranks, |world| {
            let model = sharded(&world, blocks())?;
            let read = model
                .valid()
                .loss(0, 0, &plain_device())
                .into_scalar::<f32>();
            let mut summoned = None;
            let model = summon_full_params(model, WriteBack::Discard, |full| {
                summoned = Some(params(&full));
                full
            })?;
            let kept = summon_full_params(model.clone(), WriteBack::Keep, |full| full);
            let message = kept.expect_err("merged").to_string();
            assert!(message.contains("`WriteBack::Discard`"), "{message}");
            let merged = params(&model.materialize());
            Ok((merged, summoned.expect("summoned"), read))
        }) {
            assert_eq!(merged, want);
            assert_eq!(summoned, want);
            // Without a graph Burn may run a product in another way.
            assert!(
                (read - loss).abs() <= 1e-6 * loss.abs(),
                "{read} is not {loss}"
            );
        }
    }
}

/// From Burn's module with adapters, and from one sharded over a different number of ranks.
#[test]
fn records_can_contain_only_adapters() {
    let of_adapters = || ParamGroup::from_predicate("lora");
    let record = || {
        let records = on_ranks(2, move |world| {
            let mut model = sharded(&world, blocks())?;
            let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
            model = optimizer().step(1e-2, model, gradients);
            let whole = outcome(&model, Vec::new()).params;
            let record = model.into_record_group(of_adapters());
            Ok((record.len(), record.into_bytes().expect("bytes"), whole))
        });
        records.into_iter().next().expect("a rank")
    };
    let (len, bytes, want) = record();
    assert_eq!(len, 18);
    let load = |bytes: &[u8]| {
        let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(bytes.to_vec()));
        record.expect("a record").allow_partial(true)
    };
    let alone = plain(&plain_device().autodiff(), adapters()).load_record(load(&bytes));
    assert_eq!(params(&alone), want);
    let bytes = bytes.to_vec();
    for got in on_ranks(3, move |world| {
        let model = build(MLP, &world, &device(), blocks().lora(adapters()))?;
        let model = model.load_record(load(&bytes));
        Ok(outcome(&model, Vec::new()).params)
    }) {
        assert_eq!(got, want);
    }
}

/// Factors have a norm, which is clipped, and compute in the precision's type.
#[test]
fn clipping_and_precision_work_with_adapters() {
    on_ranks(2, |world| {
        let model = sharded(&world, blocks())?;
        let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
        let clipped = clip_grad_norm(&model, gradients, Clip::to(1e-3))?;
        assert!(clipped.total_norm > 1e-3 && clipped.coefficient < 1.0);

        let precision = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
        let model = build(
            MLP,
            &world,
            &device(),
            blocks().lora(adapters()).precision(precision),
        )?;
        assert_eq!(model.blocks[0].up.weight.val().dtype(), DType::BF16);
        let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
        assert_eq!(params_with_gradient(&model, &gradients).len(), 18);
        Ok(())
    });
}

/// The adapter is trained with its base, if the base is unfrozen.
#[test]
fn a_base_that_is_thawed_is_trained_with_its_adapter() {
    let device = plain_device().autodiff();
    let mut model = plain(&device, adapters()).unfreeze();
    let mut optim = optimizer();
    for step in 0..3 {
        let loss = model.loss(0, step, &device) + model.loss(1, step, &device);
        let gradients = GradientsParams::from_grads(loss.div_scalar(2.0).backward(), &model);
        model = optim.step(1e-2, model, gradients);
    }
    let want = Outcome {
        losses: Vec::new(),
        params: params(&model),
    };
    let got = on_ranks(2, |world| {
        let mut model = sharded(&world, blocks())?.unfreeze();
        let mut optim = optimizer();
        for step in 0..3 {
            let loss = model.loss(world.rank(), step, &super::bench::device());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(outcome(&model, Vec::new()))
    });
    assert_close(&joined(&got), &want, 1e-5);
}

#[test]
fn invalid_adapters_are_rejected() {
    on_ranks(2, |world| {
        let refused = |lora| {
            let refused = build(MLP, &world, &device(), blocks().lora(lora));
            refused.expect_err("refused").to_string()
        };
        let message = refused(Lora::new(0, 1.0));
        assert!(message.contains("lora is of rank 0"), "{message}");
        let message = refused(Lora::new(2, f64::NAN));
        assert!(message.contains("an alpha of NaN"), "{message}");
        let mut sized = Lora::new(2, 1.0);
        sized.init_std = Some(-0.5);
        let message = refused(sized);
        assert!(message.contains("an `init_std` of -0.5"), "{message}");
        let message = refused(adapters().set_dtype(FloatDType::BF16));
        assert!(message.contains("of BF16 for `"), "{message}");
        let nowhere = ParamGroup::from_predicate("norm.gamma");
        let message = refused(Lora::new(2, 1.0).set_param_group(nowhere));
        assert!(
            message.contains("no sharded parameter of two dims"),
            "{message}"
        );
        let policy = blocks().lora(adapters());
        let nowhere = ParamGroup::from_predicate("downn");
        let policy = policy.lora(Lora::new(2, 1.0).set_param_group(nowhere));
        let refused = build(MLP, &world, &device(), policy).expect_err("it matches nothing");
        let message = refused.to_string();
        for words in ["in call 2 of 2", "embed.weight, blocks.0.", ", head.weight"] {
            assert!(message.contains(words), "{message}");
        }
        let mut model = in_rows(&device());
        let child = ShardPolicy::new().lora(Lora::new(2, 1.0));
        model.head = fully_shard(model.head, &world, child)?;
        let error = fully_shard(model, &world, blocks().lora(adapters())).expect_err("a child");
        assert!(
            error
                .to_string()
                .contains("`head.weight` is already sharded"),
            "{error}"
        );
        Ok(())
    });
}

#[test]
fn ranks_with_different_alphas_are_reported_at_sharding() {
    let errors = on_ranks(2, |world| {
        let alpha = 3.0 + world.rank() as f64;
        let lora = Lora::new(2, alpha).set_param_group(ParamGroup::from_predicate("blocks"));
        let refused = build(MLP, &world, &device(), blocks().lora(lora));
        Ok(refused.expect_err("they differ").to_string())
    });
    for error in errors {
        let names = |scale| error.contains(&format!("adapted at rank 2 with a scale of {scale}"));
        assert!(names(1.5) && names(2.0), "{error}");
    }
}

#[test]
fn the_wrapper_takes_adapters() {
    on_ranks(2, |world| {
        let model = in_rows(&device());
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let model = FullyShardedDataParallel::new(model, &mesh, blocks().lora(adapters()))?;
        let gradients = model.backward(model.loss(world.rank(), 0, &device()))?;
        assert!(!gradients.is_empty());
        Ok(())
    });
}
