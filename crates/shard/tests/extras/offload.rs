//! Shards on the host, compute elsewhere.

use burn::tensor::Device;
use burn_fsdp_collectives::ProcessMesh;
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{ShardPolicy, fully_shard};

use super::bench::{device, on_ranks, ready, sharded};
use super::nets::{MLP, Mlp};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

#[test]
fn offload_to_the_modules_own_device_changes_nothing() {
    for ranks in 1..=3 {
        let want = sharded(MLP, ranks, 5, blocks());
        let got = sharded(MLP, ranks, 5, blocks().offload_to(Device::flex()));
        assert_eq!(got.losses, want.losses);
        assert!(got.params == want.params, "the same bits");
    }
}

#[test]
fn offload_to_an_unknown_host_is_rejected() {
    on_ranks(1, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 1)?)?;
        let policy = blocks().offload_to(Device::capture());
        let refused = fully_shard(ready(|| Mlp::new(&device())), &mesh, policy);
        let message = refused.err().map(|error| error.to_string());
        let message = message.unwrap_or_default();
        assert!(message.contains("offload_to is"), "{message}");
        assert!(message.contains("`Device::flex()`"), "{message}");
        Ok(())
    });
}

#[cfg(not(any(feature = "ndarray", feature = "wgpu")))]
#[test]
fn bytes_move_between_a_host_and_another_backend() {
    // What is above passes if nothing is ever offloaded.
    super::skipped::skipped("built for one backend; the workspace's tests are built for two");
}

/// A GPU computes, or a stand-in for one.
#[cfg(any(feature = "ndarray", feature = "wgpu"))]
pub(crate) mod elsewhere {
    use std::sync::{Arc, Mutex};

    use burn::module::{Module, ModuleVisitor, Param};
    use burn::optim::{
        AdamW, AdamWConfig, AdamWState, GradientsAccumulator, GradientsParams, ModuleOptimizer,
        Optimizer,
    };
    use burn::tensor::Tensor;
    use burn_fsdp_collectives::ProcessGroup;
    use burn_fsdp_shard::{
        Clip, Error, FullGradient, ParameterShard, Strategy, WriteBack, backward,
        check_elementwise, clip_grad_norm, full_state, load_local_state, local_state, no_sync,
        recompute, summon_full_params,
    };

    use super::super::bench::{
        Case, Outcome, Way, assert_close, assert_same, build, named_device, optimizer, params,
        seeded_by_rank, train, train_by, whole_params,
    };
    use super::super::nets::{Block, CONV_NET, RECURRENT, tokens};
    use super::*;

    pub(crate) fn compute() -> Device {
        let name = if cfg!(feature = "wgpu") {
            "wgpu"
        } else {
            "ndarray"
        };
        named_device(name).autodiff().gradient_checkpointing()
    }

    /// The host's device, whatever device the other tests use.
    fn device() -> Device {
        Device::flex().autodiff().gradient_checkpointing()
    }

    fn offloaded(policy: ShardPolicy) -> ShardPolicy {
        policy.offload_to(Device::flex())
    }

    fn is_host(device: &Device) -> bool {
        device.clone().without_autodiff() == Device::flex()
    }

    fn trained<M: Module + 'static>(case: Case<M>, ranks: usize, policy: ShardPolicy) -> Outcome {
        let outcomes = on_ranks(ranks, move |world| {
            let device = compute();
            let model = build(case, &world, &device, policy.clone())?;
            train(model, case, world.rank(), 3, &device)
        });
        outcomes[0].clone()
    }

    fn agrees<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy) {
        for ranks in 1..=2 {
            let want = trained(case, ranks, policy.clone());
            let got = trained(case, ranks, offloaded(policy.clone()));
            assert_close(&got, &want, 1e-5);
        }
    }

    #[test]
    fn every_network_matches_training_without_offload() {
        agrees(MLP, &blocks());
        agrees(CONV_NET, &ShardPolicy::new().units(["convs.*"]));
        agrees(RECURRENT, &ShardPolicy::new().units(["layers.*"]));
    }

    #[test]
    fn every_strategy_matches_training_without_offload() {
        agrees(MLP, &blocks().strategy(Strategy::ShardGradOp));
        agrees(MLP, &blocks().strategy(Strategy::NoShard));
        agrees(MLP, &blocks().whole_below(110).prefetch(0));
    }

    #[test]
    fn offloaded_shards_step_in_backward_as_after_it() {
        for ranks in 1..=2 {
            let run = |way: Way| {
                on_ranks(ranks, move |world| {
                    let device = compute();
                    let model = build(MLP, &world, &device, offloaded(blocks()))?;
                    let (rank, plain) = (world.rank(), (MLP.build)(&device));
                    train_by(way, model, optimizer(), 3, plain, |model, step| {
                        (MLP.loss)(model, rank, step, &device)
                    })
                })
            };
            let (got, want) = (run(Way::InBackward), run(Way::AfterBackward));
            assert_same(&got[0], &want[0], "offloaded");
        }
    }

    #[test]
    fn hooks_gather_and_reduce_between_the_devices() {
        let hooked = |policy: ShardPolicy| {
            policy
                .gather_hook(|unit| {
                    let shards = unit.shards().iter();
                    unit.all_gather(shards.map(ParameterShard::tensor).collect())
                })
                .all_reduce_hook(|unit| {
                    let gradients = unit.gradients().iter();
                    unit.average(gradients.map(FullGradient::tensor).collect())
                })
                .reduction_hook(|unit| {
                    let gradients = unit.gradients().iter();
                    unit.reduce_scatter(gradients.map(FullGradient::tensor).collect())
                })
        };
        for ranks in 1..=2 {
            for policy in [blocks(), offloaded(blocks())] {
                let want = trained(MLP, ranks, policy.clone());
                assert_eq!(trained(MLP, ranks, hooked(policy)).params, want.params);
            }
        }
    }

    /// AdamW that records the devices of its inputs and states.
    #[derive(Clone)]
    struct Witness {
        adam: AdamW,
        seen: Arc<Mutex<Vec<Device>>>,
    }

    impl Optimizer for Witness {
        type State<const D: usize> = AdamWState<D>;

        fn step<const D: usize>(
            &self,
            lr: f64,
            tensor: Tensor<D>,
            grad: Tensor<D>,
            state: Option<AdamWState<D>>,
        ) -> (Tensor<D>, Option<AdamWState<D>>) {
            let given = [tensor.device(), grad.device()];
            let (tensor, state) = self.adam.step(lr, tensor, grad, state);
            let kept = state.as_ref().map(|state| state.momentum.moment_1.device());
            let mut seen = self.seen.lock().expect("no panic");
            seen.extend(given.into_iter().chain(kept));
            (tensor, state)
        }

        fn to_device<const D: usize>(state: AdamWState<D>, device: &Device) -> AdamWState<D> {
            AdamW::to_device(state, device)
        }
    }

    /// Devices by path: of stand-ins and, under the same path, of shards.
    #[derive(Default)]
    struct Places(Vec<(Device, bool)>);

    impl ModuleVisitor for Places {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.base();
            self.0.push((value.device(), value.is_require_grad()));
        }
    }

    #[test]
    fn shards_gradients_and_optimizer_are_on_the_host_and_weights_are_not() {
        on_ranks(2, |world| {
            let device = compute();
            let mut model = build(MLP, &world, &device, offloaded(blocks()))?;
            let seen = Arc::new(Mutex::new(Vec::new()));
            let mut optim = ModuleOptimizer::from(Witness {
                adam: AdamWConfig::new().build(),
                seen: seen.clone(),
            });
            check_elementwise(&model, &optim)?;
            seen.lock().expect("no panic").clear();
            for step in 0..2 {
                let loss = model.loss(world.rank(), step, &device);
                let gradients = backward(loss, &model)?;
                model = optim.step(1e-2, model, gradients);
                let mut places = Places::default();
                model.visit(&mut places);
                let (shards, others): (Vec<_>, Vec<_>) =
                    places.0.into_iter().partition(|(_, trains)| *trains);
                assert_eq!(shards.len(), 1 + 3 * 7 + 3);
                assert!(shards.iter().all(|(device, _)| is_host(device)));
                assert!(others.iter().all(|(device, _)| !is_host(device)));
                assert!(!is_host(&model.blocks[0].up.weight.val().device()));
                burn_fsdp_shard::reset(&model)?;
            }
            let seen = seen.lock().expect("no panic");
            assert_eq!(seen.len(), 2 * 3 * (1 + 3 * 7 + 3));
            assert!(seen.iter().all(is_host), "{seen:?}");
            assert_eq!(model.devices(), [device]);
            Ok(())
        });
    }

    #[test]
    fn a_module_on_two_backends_is_refused_by_paths() {
        on_ranks(1, |world| {
            let mesh = ProcessMesh::new(&world, Mesh::line("shard", 1)?)?;
            let mut model = ready(|| Mlp::new(&device()));
            model.head = model.head.to_device(&compute());
            let refused = fully_shard(model, &mesh, offloaded(blocks()));
            let message = refused.err().map(|error| error.to_string());
            let message = message.unwrap_or_default();
            assert!(message.contains("`embed.weight` is on"), "{message}");
            assert!(message.contains("but `head.weight` is on"), "{message}");
            let is_named = ["Wgpu", "NdArray"]
                .iter()
                .any(|name| message.contains(name));
            assert!(is_named, "{message}");
            Ok(())
        });
    }

    fn one_step(
        world: &ProcessGroup,
        policy: ShardPolicy,
    ) -> Result<(Mlp, GradientsParams), Error> {
        let model = build(MLP, world, &compute(), policy)?;
        let loss = model.loss(world.rank(), 0, &compute());
        let gradients = backward(loss, &model)?;
        Ok((model, gradients))
    }

    #[test]
    fn norms_and_whole_state_match_a_module_without_offload() {
        for ranks in 1..=2 {
            on_ranks(ranks, |world| {
                let mut outcomes = Vec::new();
                for policy in [blocks(), offloaded(blocks())] {
                    let (model, gradients) = one_step(&world, policy)?;
                    let clipped = clip_grad_norm(&model, gradients, Clip::to(0.01))?;
                    let model = optimizer().step(1e-2, model, clipped.gradients);
                    let mut state = Vec::new();
                    full_state(&model, |tensor| {
                        let (words, _) = tensor.bytes.as_chunks::<4>();
                        let values: Vec<f32> =
                            words.iter().map(|word| f32::from_ne_bytes(*word)).collect();
                        state.push((tensor.path.to_owned(), values));
                    })?;
                    outcomes.push((clipped.total_norm as f32, state));
                }
                let [want, got] = outcomes.try_into().expect("two");
                let outcome = |(norm, params)| Outcome {
                    losses: vec![norm],
                    params,
                };
                assert_close(&outcome(got), &outcome(want), 1e-5);
                Ok(())
            });
        }
    }

    #[test]
    fn whole_parameters_records_and_moves_work() {
        on_ranks(2, |world| {
            let device = compute();
            let model = build(MLP, &world, &device, offloaded(blocks()))?;
            let want = whole_params(Mlp::new(&device), &model);
            let before = model.loss(0, 0, &device).into_scalar::<f32>();
            let mut seen = Vec::new();
            let model = summon_full_params(model, WriteBack::Keep, |full| {
                assert!(!is_host(&full.head.weight.val().device()));
                seen = params(&full);
                full
            })?;
            assert_eq!(seen, want);
            let record = model.into_record();
            let fresh = build(MLP, &world, &device, offloaded(blocks()))?;
            let model = fresh.load_record(record);
            let model = load_local_state(model, |tensor| {
                Ok::<_, Error>(Some(tensor.elements.as_bytes().to_vec()))
            })?;
            assert_eq!(whole_params(Mlp::new(&device), &model), want);
            assert!(!local_state(&model)?.is_empty());
            let mut places = Places::default();
            model.visit(&mut places);
            let shards = places.0.iter().filter(|(_, trains)| *trains);
            assert!(shards.clone().count() > 0);
            assert!(shards.clone().all(|(device, _)| is_host(device)));

            let plain = device.clone().without_autodiff();
            let evaluated = model.valid().loss(0, 0, &plain).into_scalar::<f32>();
            assert!((evaluated - before).abs() <= 1e-6 * before.abs());
            // The computing device changes; the shards' device does not.
            let moved = model.fork(&self::device());
            assert!(is_host(&moved.head.weight.val().device()));
            burn_fsdp_shard::reset(&moved)?;
            let back = moved.fork(&device);
            let loss = back.loss(world.rank(), 0, &device);
            assert!(!backward(loss, &back)?.is_empty());
            Ok(())
        });
    }

    /// Micro-batches without reduction, and regions whose activations are recomputed.
    #[test]
    fn accumulation_and_checkpointed_regions_work() {
        let run = |policy: ShardPolicy| {
            let outcomes = on_ranks(2, move |world| {
                let device = compute();
                let mut model = build(MLP, &world, &device, policy.clone())?;
                let mut optim = optimizer();
                let mut losses = Vec::new();
                for step in 0..3 {
                    let loss = |model: &Mlp, micro: usize| {
                        let tokens = tokens([2, 4], 11, world.rank() + 2 * micro, step, &device);
                        let x = model
                            .blocks
                            .iter()
                            .fold(model.embed.forward(tokens), |x, block| {
                                recompute(block, x, |block: &Block, x| block.forward(x))
                            });
                        let x = model.head.forward(model.norm.forward(x));
                        x.powf_scalar(2.0).mean().div_scalar(2.0)
                    };
                    let mut sum = GradientsAccumulator::new();
                    no_sync(&model, || backward(loss(&model, 0), &model).map(drop))??;
                    let last = loss(&model, 1);
                    losses.push(last.clone().into_scalar::<f32>());
                    sum.accumulate(&model, backward(last, &model)?);
                    model = optim.step(1e-2, model, sum.grads());
                }
                let params = whole_params(Mlp::new(&device), &model);
                Ok(Outcome { losses, params })
            });
            outcomes[0].clone()
        };
        assert_close(&run(offloaded(blocks())), &run(blocks()), 1e-5);
    }

    #[test]
    fn neighbours_and_replicas_work() {
        let run = |policy: ShardPolicy| {
            let outcomes = on_ranks(4, move |world| {
                let device = compute();
                let (model, gradients) = {
                    let layout = Mesh::new([("replicate", 2), ("shard", 2)])?;
                    let mesh = ProcessMesh::new(&world, layout)?;
                    let policy = policy.clone().replicate_axis("replicate");
                    let model = seeded_by_rank(Mlp::new(&device), world.rank());
                    let model = fully_shard(model, &mesh, policy)?;
                    let loss = model.loss(world.rank(), 0, &device);
                    let gradients = backward(loss, &model)?;
                    (model, gradients)
                };
                let model = optimizer().step(1e-2, model, gradients);
                Ok(whole_params(Mlp::new(&device), &model))
            });
            Outcome {
                losses: Vec::new(),
                params: outcomes[0].clone(),
            }
        };
        assert_close(&run(offloaded(blocks())), &run(blocks()), 1e-5);
        let near = || blocks().reshard_after_forward_to(2);
        let want = trained(MLP, 4, near());
        assert_close(&trained(MLP, 4, offloaded(near())), &want, 1e-5);
    }
}
