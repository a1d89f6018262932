//! Inputs of regions on the host until backward.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_fsdp_shard::{ShardPolicy, offload_activations, recompute};

use super::bench::{Case, assert_same, device, plainly, sharded};
use super::nets::{Block, MLP, Mlp, tokens};

fn square<const D: usize>(output: Tensor<D>) -> Tensor<1> {
    output.powf_scalar(2.0).mean()
}

/// The inputs of a region around a block: a mask of nothing, and every position in order.
type Given = (Tensor<3>, Tensor<3, Bool>, Tensor<1, Int>);

fn given(x: Tensor<3>) -> Given {
    let mask = x.clone().inner().is_nan().into_data();
    let mask = Tensor::from_data(mask, &x.device());
    let places = Tensor::arange(0..x.dims()[1] as i64, &x.device());
    (x, mask, places)
}

/// A region around each block, with a region inside. It computes the same as the block.
fn in_regions(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    for block in &model.blocks {
        x = recompute(
            block,
            given(x),
            |block: &Block, (x, mask, places): Given| {
                let x = x.mask_fill(mask, 0.0).select(1, places);
                recompute(block, x, |block: &Block, x| block.forward(x))
            },
        );
    }
    square(model.head.forward(model.norm.forward(x)))
}

fn offloaded(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let loss = offload_activations(Device::flex(), || in_regions(model, rank, step, device));
    loss.expect("the CPU backend")
}

#[test]
fn a_host_that_cannot_be_used_is_rejected_by_name() {
    for (host, name) in [
        (Device::capture(), "Capture"),
        (Device::flex().autodiff(), "Autodiff"),
    ] {
        let refused = offload_activations(host, || unreachable!("a wrong host"));
        let message = refused
            .err()
            .map(|error: burn_fsdp_shard::Error| error.to_string());
        let message = message.unwrap_or_default();
        assert!(
            message.contains("offload_activations is given"),
            "{message}"
        );
        assert!(message.contains(name), "{message}");
        assert!(message.contains("`Device::flex()`"), "{message}");
    }
}

/// Nothing is computed differently where activations are in the host's memory anyway.
#[test]
fn a_model_on_the_host_keeps_its_bits() {
    let [with, without] = [offloaded, in_regions].map(|loss| Case { loss, ..MLP });
    for ranks in 1..=3 {
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let got = sharded(with, ranks, 4, policy.clone());
        assert_same(&got, &sharded(without, ranks, 4, policy), "sharded");
        assert_same(
            &plainly(with, ranks, 4),
            &plainly(without, ranks, 4),
            "plain",
        );
    }
}

/// Without a graph, `recompute` only runs the forward, and nothing waits.
#[test]
fn regions_without_a_graph_just_run() {
    let plain = device().without_autodiff();
    let layer: Linear = LinearConfig::new(3, 3).init(&plain);
    let x = Tensor::<2>::ones([2, 3], &plain);
    let want = layer.forward(x.clone()).into_data();
    let got = offload_activations(Device::flex(), || {
        recompute(&layer, x, |layer: &Linear, x| layer.forward(x))
    });
    assert_eq!(got.expect("the CPU backend").into_data(), want);
}

#[cfg(not(any(feature = "ndarray", feature = "wgpu")))]
#[test]
fn inputs_move_between_a_host_and_another_backend() {
    // What is above passes if nothing is ever offloaded.
    super::skipped::skipped("built for one backend; the workspace's tests are built for two");
}

/// A GPU computes, or a stand-in for one.
#[cfg(any(feature = "ndarray", feature = "wgpu"))]
mod elsewhere {
    use std::cell::RefCell;

    use burn::module::Module;
    use burn::tensor::kind::Basic;
    use burn::tensor::{DType, Gradients};
    use burn_fsdp_shard::{Staged, Strategy, backward, memory};

    use super::super::bench::{
        Outcome, assert_close, build, joined, on_ranks, optimizer, plainly_on, seeded, whole_params,
    };
    use super::super::nets::input;
    use super::super::offload::elsewhere::compute;
    use super::*;

    #[derive(Module, Debug)]
    struct Pair {
        first: Linear,
        second: Linear,
    }

    impl Pair {
        fn new() -> Self {
            let linear = || LinearConfig::new(5, 5).init(&compute());
            seeded(
                Self {
                    first: linear(),
                    second: linear(),
                },
                3,
            )
        }
    }

    /// A way to run a part of a forward on a nest.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Way {
        Kept,
        Recomputed,
        Offloaded,
    }

    const WAYS: [Way; 3] = [Way::Kept, Way::Recomputed, Way::Offloaded];

    impl Way {
        fn forward<T>(self, forward: impl FnOnce() -> T) -> T {
            match self {
                Self::Offloaded => {
                    offload_activations(Device::flex(), forward).expect("the CPU backend")
                }
                _ => forward(),
            }
        }
    }

    fn leaf<const D: usize>(shape: [usize; D], number: usize) -> Tensor<D> {
        input(shape, number, 1, &compute()).require_grad()
    }

    /// The bits of a gradient on the computing device.
    fn bits<const D: usize>(leaf: &Tensor<D>, gradients: &Gradients) -> Option<Vec<u8>> {
        let gradient = leaf.grad(gradients)?;
        assert_eq!(gradient.device(), compute().without_autodiff());
        Some(gradient.into_data().as_bytes().to_vec())
    }

    fn bits_of_pair(pair: &Pair, gradients: &Gradients) -> Vec<Option<Vec<u8>>> {
        let linears = [&pair.first, &pair.second].into_iter();
        let weights = linears.map(|linear| bits(&linear.weight.val(), gradients));
        weights.collect()
    }

    type Nest = (
        Tensor<2>,
        Vec<Tensor<1>>,
        Option<[Tensor<2>; 2]>,
        (Tensor<1, Int>, Tensor<2, Bool>),
        [Tensor<2>; 2],
    );

    /// The type, device and values of a tensor.
    type Seen = (DType, Device, Vec<u8>);

    thread_local! {
        /// The tensors of a nest, by run of the region.
        static SEEN: RefCell<Vec<Vec<Seen>>> = const { RefCell::new(Vec::new()) };
    }

    fn seen<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Seen {
        let values = tensor.clone().into_data().as_bytes().to_vec();
        (tensor.dtype(), tensor.device(), values)
    }

    fn nested(pair: &Pair, nest: Nest) -> (Tensor<2>, Tensor<1, Int>) {
        let (x, shifts, sides, (places, mask), [plain, on_host]) = nest;
        let mut all = vec![
            seen(&x),
            seen(&places),
            seen(&mask),
            seen(&plain),
            seen(&on_host),
        ];
        all.extend(shifts.iter().map(seen));
        all.extend(sides.iter().flatten().map(seen));
        SEEN.with_borrow_mut(|runs| runs.push(all));
        let constant = |tensor: Tensor<2>| {
            let data = tensor.into_data().convert::<f32>();
            Tensor::<2>::from_data(data, &compute())
        };
        let mut y = pair.first.forward(x) * constant(plain) + constant(on_host);
        for shift in shifts {
            y = y + shift.unsqueeze();
        }
        for side in sides.into_iter().flatten() {
            y = y * side.mask_fill(mask.clone(), 0.5);
        }
        let chosen = pair.second.forward(y.tanh()).select(0, places.clone());
        (chosen, places + 1)
    }

    /// Floats, ints and bools, leaves and others, with and without gradients, of several types, and one that is on the
    /// host already.
    #[test]
    fn inputs_return_with_their_devices_types_and_bits() {
        let run = |way: Way| {
            SEEN.take();
            let pair = Pair::new();
            let plain = compute().without_autodiff();
            let (x, shift, side) = (leaf([4, 5], 1), leaf([5], 2), leaf([4, 5], 3));
            let nest = (
                x.clone().exp(),
                vec![shift.clone(), input([5], 4, 1, &compute())],
                Some([side.clone(), side.clone() + 1.0]),
                (
                    Tensor::<1, Int>::from_data([2, 0, 2], (&compute(), DType::I32)),
                    input::<2>([4, 5], 5, 1, &compute()).greater_elem(0.0),
                ),
                [
                    input([4, 5], 6, 1, &plain).cast(DType::F64),
                    input([4, 5], 7, 1, &Device::flex()).cast(DType::F16),
                ],
            );
            let (chosen, next) = way.forward(|| match way {
                Way::Kept => nested(&pair, nest),
                _ => recompute(&pair, nest, nested),
            });
            assert_eq!(next.dtype(), DType::I32);
            let gradients = chosen.square().sum().backward();
            let mut all = vec![
                bits(&x, &gradients),
                bits(&shift, &gradients),
                bits(&side, &gradients),
            ];
            all.extend(bits_of_pair(&pair, &gradients));
            assert!(all.iter().all(Option::is_some));
            (all, SEEN.take())
        };
        let [kept, recomputed, offloaded] = WAYS.map(run);
        assert_eq!(recomputed.0, kept.0);
        assert_eq!(offloaded.0, kept.0);
        assert_eq!(kept.1.len(), 1);
        let devices = |run: &[(DType, Device, Vec<u8>)]| {
            let plain = run
                .iter()
                .map(|(_, device, _)| device.clone().without_autodiff());
            plain.filter(|device| *device == Device::flex()).count()
        };
        assert_eq!(devices(&kept.1[0]), 1);
        for runs in [recomputed.1, offloaded.1] {
            assert_eq!(runs.len(), 2);
            for run in runs {
                assert!(run == kept.1[0], "{run:?}, expected {:?}", kept.1[0]);
            }
        }
    }

    /// A tensor with graph that two regions and other code use, a mask that both use, and regions inside of a region.
    #[test]
    fn inputs_may_be_used_several_times() {
        let run = |way: Way| {
            let pair = Pair::new();
            let leaf = leaf::<2>([4, 5], 1);
            let loss = way.forward(|| {
                let mask = leaf.clone().inner().greater_elem(0.0);
                let mask = Tensor::<2, Bool>::from_data(mask.into_data(), &compute());
                let masked = |pair: &Pair, (x, mask): (Tensor<2>, Tensor<2, Bool>)| {
                    let y = pair.first.forward(x).mask_fill(mask, 0.5);
                    pair.second.forward(y).tanh()
                };
                let region = move |pair: &Pair, given| match way {
                    Way::Kept => masked(pair, given),
                    _ => recompute(pair, given, masked),
                };
                let x = leaf.clone().exp();
                let a = region(&pair, (x.clone(), mask.clone()));
                let b = region(&pair, (x.clone() * 2.0, mask.clone()));
                let twice = move |pair: &Pair, (x, mask): (Tensor<2>, Tensor<2, Bool>)| {
                    let y = region(pair, (x, mask.clone()));
                    region(pair, (y, mask))
                };
                let given = (x.clone(), mask.bool_not());
                let c = match way {
                    Way::Kept => twice(&pair, given),
                    _ => recompute(&pair, given, twice),
                };
                // The last use, which may overwrite it.
                let d = (x.add_scalar(1.0) * 3.0).log();
                (a * b + c * d).square().sum()
            });
            let gradients = loss.backward();
            let mut all = vec![bits(&leaf, &gradients)];
            all.extend(bits_of_pair(&pair, &gradients));
            assert!(all.iter().all(Option::is_some));
            all
        };
        let [kept, recomputed, offloaded] = WAYS.map(run);
        assert_eq!(offloaded, recomputed);
        // Regions add the gradients of their inputs in another order.
        for (got, want) in offloaded.iter().flatten().zip(kept.iter().flatten()) {
            for (got, want) in got.as_chunks::<4>().0.iter().zip(want.as_chunks::<4>().0) {
                let [got, want] = [got, want].map(|bytes| f32::from_ne_bytes(*bytes));
                assert!(
                    (got - want).abs() <= 1e-5 * want.abs().max(0.1),
                    "{got}, {want}"
                );
            }
        }
    }

    /// Returns the losses, the parameters, and the copies of three steps on another backend than the host.
    fn trained(
        loss: fn(&Mlp, usize, usize, &Device) -> Tensor<1>,
        ranks: usize,
        policy: &ShardPolicy,
    ) -> (Outcome, Vec<Staged>) {
        let policy = policy.clone();
        let seen = on_ranks(ranks, move |world| {
            let device = compute();
            let mut model = build(MLP, &world, &device, policy.clone())?;
            let (mut optim, mut losses) = (optimizer(), Vec::new());
            for step in 0..3 {
                let gradients = if step == 1 {
                    // Backward inside of the call.
                    offload_activations(Device::flex(), || {
                        let loss = loss(&model, world.rank(), step, &device);
                        losses.push(loss.clone().into_scalar::<f32>());
                        backward(loss, &model)
                    })??
                } else {
                    let loss = loss(&model, world.rank(), step, &device);
                    losses.push(loss.clone().into_scalar::<f32>());
                    backward(loss, &model)?
                };
                model = optim.step(1e-2, model, gradients);
            }
            let staged = memory(&model)?.staged;
            let params = whole_params(Mlp::new(&device), &model);
            Ok((Outcome { losses, params }, staged))
        });
        let (outcomes, staged): (Vec<_>, Vec<_>) = seen.into_iter().unzip();
        (joined(&outcomes), staged)
    }

    /// Training has the bits of training with regions that keep their inputs. Each input is copied once in each direction.
    #[test]
    fn sharded_training_matches_plain_burn() {
        let blocks = || ShardPolicy::new().units(["blocks.*"]);
        let policies = [
            blocks(),
            blocks().prefetch(2),
            blocks().strategy(Strategy::ShardGradOp),
            blocks().strategy(Strategy::NoShard),
            blocks().offload_to(Device::flex()),
            blocks().recompute_in(["blocks.1"]),
            ShardPolicy::new(),
        ];
        for ranks in 1..=3 {
            let plain = plainly_on(&compute().without_autodiff(), MLP, ranks, 3);
            for (number, policy) in policies.iter().enumerate() {
                let what = format!("policy {number}, {ranks} ranks");
                let (want, without) = trained(in_regions, ranks, policy);
                let (got, with) = trained(offloaded, ranks, policy);
                assert_same(&got, &want, &what);
                assert_close(&got, &plain, 1e-5);
                // In `without`, only the second of three steps is inside of the call.
                let regions = if number == 5 { 1 } else { 3 } * 2;
                for (with, without) in with.iter().zip(&without) {
                    for (with, without) in [
                        (with.to_host, without.to_host),
                        (with.to_device, without.to_device),
                    ] {
                        assert_eq!(with.number - without.number, 3 * regions, "{what}");
                        let num_bytes = regions * bytes_of_a_region();
                        assert_eq!(with.bytes - without.bytes, num_bytes, "{what}");
                    }
                }
            }
        }
    }

    fn bytes_of_a_region() -> usize {
        fn bytes<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> usize {
            tensor.shape().num_elements() * tensor.dtype().size()
        }
        let width = Mlp::new(&compute()).embed.weight.dims()[1];
        let (x, mask, places) = given(Tensor::zeros([2, 4, width], &compute()));
        bytes(&x) + bytes(&mask) + bytes(&places)
    }

    /// The memory of a GPU cannot be examined in this way.
    #[cfg(not(feature = "wgpu"))]
    #[allow(deprecated, reason = "there is no other second backend on the CPU")]
    mod freed {
        use burn::backend::{BackendTypes, NdArray};

        use super::*;

        type Primitive = <NdArray as BackendTypes>::FloatTensorPrimitive;

        thread_local! {
            /// Other references to the inputs of regions.
            static WITNESSES: RefCell<Vec<Tensor<3>>> = const { RefCell::new(Vec::new()) };
        }

        /// Returns true if no other tensor shares the memory of `witness`.
        fn is_alone(witness: Tensor<3>) -> bool {
            match witness.try_into_primitive::<NdArray>() {
                Ok(Primitive::F32(storage)) => storage.is_unique(),
                _ => panic!("not an f32 tensor of the computing backend"),
            }
        }

        fn block_in_region(block: &Block, x: Tensor<3>) -> Tensor<3> {
            WITNESSES.with_borrow_mut(|witnesses| witnesses.push(x.clone().inner()));
            recompute(block, x, |block: &Block, x| block.forward(x))
        }

        fn watched(model: &Mlp, device: &Device) -> Tensor<1> {
            let x = model.embed.forward(tokens([2, 4], 11, 0, 0, device));
            let x = model
                .blocks
                .iter()
                .fold(x, |x, block| block_in_region(block, x));
            square(model.head.forward(model.norm.forward(x)))
        }

        /// Which inputs are in no memory of the device between forward and backward, except for their witness.
        fn freed(model: &Mlp, way: Way) -> Vec<bool> {
            let loss = way.forward(|| watched(model, &compute()));
            let freed = WITNESSES.take().into_iter().map(is_alone).collect();
            drop(loss);
            freed
        }

        #[test]
        fn inputs_leave_the_device_until_backward() {
            let plain = Mlp::new(&compute());
            assert_eq!(freed(&plain, Way::Recomputed), [false; 3]);
            assert_eq!(freed(&plain, Way::Offloaded), [true; 3]);
            for ranks in 1..=2 {
                let freed = on_ranks(ranks, |world| {
                    let policy = ShardPolicy::new().units(["blocks.*"]);
                    let model = build(MLP, &world, &compute(), policy)?;
                    let with = freed(&model, Way::Offloaded);
                    burn_fsdp_shard::reset(&model)?;
                    let without = freed(&model, Way::Recomputed);
                    burn_fsdp_shard::reset(&model)?;
                    Ok((with, without))
                });
                for (with, without) in freed {
                    assert_eq!((with, without), (vec![true; 3], vec![false; 3]));
                }
            }
        }

        /// Other code that uses an input keeps it, and no longer than it would without the region.
        #[test]
        fn an_input_lives_as_long_as_other_code_uses_it() {
            let model = Mlp::new(&compute());
            let x = model.embed.forward(tokens([2, 4], 11, 0, 0, &compute()));
            let x = block_in_region(&model.blocks[0], x).detach();
            WITNESSES.take();
            let loss = Way::Offloaded.forward(|| {
                let a = block_in_region(&model.blocks[1], x.clone());
                let b = block_in_region(&model.blocks[2], x.clone());
                (a * b).sum()
            });
            let mut witnesses = WITNESSES.take();
            assert!(!is_alone(witnesses.pop().expect("two regions")));
            drop(x);
            assert!(is_alone(witnesses.pop().expect("two regions")));
            let gradients = loss.backward();
            assert!(model.blocks[2].up.weight.val().grad(&gradients).is_some());
        }
    }
}
