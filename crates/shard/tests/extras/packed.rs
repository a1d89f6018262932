//! Gathers in 8 bits: every rank computes with the same rounded weights, and trains the exact ones.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::gelu;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_collectives::OperationKind;
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Cut, Precision, ShardPolicy, Strategy, backward, evaluate, fully_shard, reset,
};

use super::bench::{
    Case, Outcome, SEED, assert_close, build, device, on_ranks, optimizer, params, plain_device,
    plainly, seeded, seeded_by_rank, sharded, whole_params,
};
use super::nets::{CONV_NET, MLP, RECURRENT, input};

/// Weights of some blocks and a part, of less than one, and vectors.
#[derive(Module, Debug)]
struct Wide {
    layers: Vec<Linear>,
    norm: LayerNorm,
    head: Linear,
}

impl Wide {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(29, 29).init(device);
        Self {
            layers: (0..2).map(|_| layer()).collect(),
            norm: LayerNormConfig::new(29).init(device),
            head: LinearConfig::new(29, 3).init(device),
        }
    }

    fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x: Tensor<2> = input([3, 29], rank, step, device);
        let x = self
            .layers
            .iter()
            .fold(x, |x, layer| x.clone() + gelu(layer.forward(x)));
        let x = self.head.forward(self.norm.forward(x));
        x.powf_scalar(2.0).mean()
    }
}

const WIDE: Case<Wide> = Case {
    build: Wide::new,
    loss: Wide::loss,
};

/// The layout of a parameter on ranks, in the words of the documentation.
#[derive(Debug, Clone, Copy)]
enum Layout {
    Flat(usize),
    /// At multiples of 256.
    Multiples,
    Rows(usize),
}

/// The weights as they arrive: each shard from its first element on in blocks of 256, each a whole number of 127ths of its
/// largest.
fn rounded(values: &[f32], shape: &[usize], layout: Layout) -> Vec<f32> {
    let shard = match layout {
        Layout::Flat(ranks) => values.len().div_ceil(ranks),
        Layout::Multiples => values.len(),
        Layout::Rows(ranks) => shape[0].div_ceil(ranks) * shape[1..].iter().product::<usize>(),
    };
    let mut rounded = Vec::new();
    for block in values.chunks(shard).flat_map(|shard| shard.chunks(256)) {
        let largest = block.iter().map(|value| value.abs()).fold(0.0, f32::max);
        let step = largest / 127.0;
        for value in block {
            let number = if step == 0.0 {
                0.0
            } else {
                (value / step).round_ties_even()
            };
            let near = number * step;
            assert!(
                (near - value).abs() <= largest / 254.0 * 1.0001,
                "the bound"
            );
            rounded.push(near);
        }
    }
    rounded
}

/// Puts rounded weights in the place of those with at least two dims; gradients are those of the exact ones.
struct Round(Layout);

impl ModuleMapper for Round {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D < 2 {
            return param;
        }
        let exact = param.val();
        let data = exact.clone().into_data();
        let values = data.try_to_vec::<f32>().expect("floats");
        let values = rounded(&values, &exact.dims(), self.0);
        let near = burn::tensor::TensorData::new(values, exact.shape());
        let near = Tensor::from_data(near, &exact.device());
        let nothing = exact.clone() - exact.detach();
        Param::initialized(param.id, near + nothing)
    }
}

/// Burn alone, with rounded weights in each forward.
fn plainly_rounded<M: Module + 'static>(
    case: Case<M>,
    ranks: usize,
    steps: usize,
    layout: Layout,
) -> Outcome {
    let device = plain_device().autodiff();
    let mut model = seeded((case.build)(&device), SEED);
    let mut optim = optimizer();
    let mut losses = Vec::new();
    for step in 0..steps {
        let near = model.clone().map(&mut Round(layout));
        let parts = (0..ranks).map(|rank| (case.loss)(&near, rank, step, &device));
        let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
        let loss = sum.div_scalar(ranks as f32);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, gradients);
    }
    Outcome {
        losses,
        params: params(&model),
    }
}

fn packed(units: &str) -> ShardPolicy {
    ShardPolicy::new().units([units]).gather_in_8_bits(true)
}

fn is_close(got: &Outcome, want: &Outcome) -> bool {
    let pairs = got.losses.iter().zip(&want.losses);
    pairs
        .clone()
        .all(|(got, want)| (got - want).abs() <= 1e-5 * want.abs())
}

fn agrees<M: Module + 'static>(case: Case<M>, units: &str) {
    let exact = plainly(case, 2, 3);
    for ranks in 1..=4 {
        let cuts = [
            (Cut::Elements, Layout::Flat(ranks)),
            (Cut::Multiples(256), Layout::Multiples),
            (Cut::Dims, Layout::Rows(ranks)),
        ];
        for (cut, layout) in cuts {
            let want = plainly_rounded(case, ranks, 3, layout);
            let got = sharded(case, ranks, 3, packed(units).cut(cut));
            assert_close(&got, &want, 1e-4);
            assert!(ranks != 2 || !is_close(&got, &exact), "rounding is seen");
        }
    }
}

#[test]
fn training_matches_burn_with_rounded_weights() {
    agrees(WIDE, "layers.*");
    agrees(MLP, "blocks.*");
    agrees(CONV_NET, "convs.*");
    agrees(RECURRENT, "layers.*");
}

/// To the bit, also after the exact weights have moved, and by whom they are owned.
#[test]
fn all_ranks_use_the_rounded_weights_and_keep_the_exact() {
    for ranks in 1..=4 {
        let policies = [
            (packed("layers.*"), Layout::Flat(ranks)),
            (
                packed("layers.*").cut(Cut::Multiples(256)),
                Layout::Multiples,
            ),
            (packed("layers.*").cut(Cut::Dims), Layout::Rows(ranks)),
            (packed("layers.*").one_owner(["**"]), Layout::Multiples),
            (
                packed("layers.*").strategy(Strategy::ShardGradOp),
                Layout::Flat(ranks),
            ),
        ];
        for (policy, layout) in policies {
            on_ranks(ranks, move |world| {
                let device = device();
                let mut model = build(WIDE, &world, &device, policy.clone())?;
                let mut optim = optimizer();
                for step in 0..3 {
                    let exact = whole_params(Wide::new(&device), &model);
                    let weights = |path: &str| {
                        let found = exact.iter().find(|(known, _)| known == path);
                        found.expect("a parameter").1.clone()
                    };
                    for (path, layer) in [
                        ("layers.0.weight", &model.layers[0]),
                        ("layers.1.weight", &model.layers[1]),
                        ("head.weight", &model.head),
                    ] {
                        let used = layer.weight.val();
                        let want = rounded(&weights(path), &used.dims(), layout);
                        let used = used.into_data().try_to_vec::<f32>().expect("floats");
                        assert!(used == want, "{path} on {ranks} ranks, {layout:?}");
                        assert_ne!(used, weights(path), "{path}");
                        let bias = layer.bias.as_ref().expect("a bias").val();
                        let bias = bias.into_data().try_to_vec::<f32>().expect("floats");
                        assert_eq!(bias, weights(&path.replace("weight", "bias")));
                    }
                    reset(&model)?;
                    let loss = model.loss(world.rank(), step, &device);
                    let gradients = backward(loss, &model)?;
                    model = optim.step(1e-2, model, gradients);
                }
                Ok(())
            });
        }
    }
}

/// An element is one byte, and 256 of a shard share four more; the shorter shards are sent as long as the first.
#[test]
fn traffic_falls_to_a_quarter() {
    for ranks in 2..=4 {
        let gathered = |policy: ShardPolicy| {
            let bytes = on_ranks(ranks, move |world| {
                let mut model = build(WIDE, &world, &device(), policy.clone())?;
                let mut optim = optimizer();
                // The first step agrees on its order.
                let mut counts = world.counts();
                for step in 0..2 {
                    counts = world.counts();
                    let gradients = backward(model.loss(world.rank(), step, &device()), &model)?;
                    model = optim.step(1e-2, model, gradients);
                }
                let counts = world.counts().since(&counts);
                Ok(counts)
            });
            bytes[0]
        };
        let record = |elements: usize| {
            let shard = elements.div_ceil(ranks);
            ranks * (shard + 4 * shard.div_ceil(256))
        };
        let (layer, head) = (29 * 29, 29 * 3);
        let exact = gathered(ShardPolicy::new().units(["layers.*"]));
        let got = gathered(packed("layers.*"));
        let bytes =
            |counts: burn_fsdp_collectives::OperationCounts, kind| counts.of(kind).bytes as usize;
        let gathers = OperationKind::AllGather;
        // Both layers in forward, the second in backward (nobody wants the gradient of the input), the root once.
        assert_eq!(bytes(exact, gathers), 4 * (3 * layer + head));
        assert_eq!(bytes(got, gathers), 3 * record(layer) + record(head));
        assert_eq!(got.of(gathers).operations, exact.of(gathers).operations);
        assert!(bytes(got, gathers) * 10 < bytes(exact, gathers) * 3);
        for kind in [OperationKind::ReduceScatter, OperationKind::AllReduce] {
            assert_eq!(got.of(kind), exact.of(kind));
        }
    }
}

/// Rounded in 32 bits, and cast to what computes.
#[test]
fn weights_computing_in_16_bits_are_rounded_before_the_cast() {
    on_ranks(3, |world| {
        let policy = packed("blocks.*").precision(Precision::new(FloatDType::BF16));
        let model = build(MLP, &world, &device(), policy)?;
        let exact = whole_params((MLP.build)(&device()), &model);
        let (path, values) = exact
            .iter()
            .find(|(path, _)| path == "blocks.1.up.weight")
            .expect("a parameter");
        let used = model.blocks[1].up.weight.val();
        assert_eq!(used.dtype(), DType::BF16);
        let want = rounded(values, &[15, 7], Layout::Flat(3));
        let want = want
            .iter()
            .map(|value| half::bf16::from_f32(*value).to_f32());
        let used = used.into_data().convert::<f32>().try_to_vec::<f32>();
        assert_eq!(used.expect("floats"), want.collect::<Vec<_>>(), "{path}");
        reset(&model)?;
        Ok(())
    });
}

/// Gathered once in 8 bits; between neighbours in backward as they are, in 32.
#[test]
fn neighbours_and_replicas_use_the_same_weights() {
    let want = plainly_rounded(WIDE, 4, 3, Layout::Flat(4));
    let near = packed("layers.*").reshard_after_forward_to(2);
    assert_close(&sharded(WIDE, 4, 3, near), &want, 1e-4);

    let want = plainly_rounded(WIDE, 4, 1, Layout::Flat(2));
    let outcomes = on_ranks(4, |world| {
        let mesh = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = burn_fsdp_collectives::ProcessMesh::new(&world, mesh)?;
        let policy = packed("layers.*").replicate_axis("replicate");
        let model = seeded_by_rank(Wide::new(&device()), world.rank());
        let model = fully_shard(model, &mesh, policy)?;
        let loss = model.loss(world.rank(), 0, &device());
        let gradients = backward(loss, &model)?;
        let model = optimizer().step(1e-2, model, gradients);
        Ok(whole_params(Wide::new(&device()), &model))
    });
    for params in outcomes {
        let got = Outcome {
            losses: want.losses.clone(),
            params,
        };
        assert_close(&got, &want, 1e-4);
    }
}

/// Evaluated with the weights that it trains with; nothing is rounded where every rank holds the whole.
#[test]
fn evaluation_uses_rounded_weights_but_full_parameters_are_exact() {
    on_ranks(2, |world| {
        let device = plain_device();
        let model = build(WIDE, &world, &self::device(), packed("layers.*"))?;
        let plain = seeded(Wide::new(&device), SEED);
        let want = plain.clone().map(&mut Round(Layout::Flat(2)));
        let want = want.loss(0, 0, &device).into_scalar::<f32>();
        let exact = plain.loss(0, 0, &device).into_scalar::<f32>();
        let got = evaluate(&model, |valid| {
            valid.loss(0, 0, &device).into_scalar::<f32>()
        })?;
        assert!((got - want).abs() <= 1e-6 * want.abs(), "{got}, {want}");
        assert!((got - exact).abs() > 1e-5 * want.abs(), "{got}, {exact}");

        let policy = packed("layers.*").strategy(Strategy::NoShard);
        let model = build(WIDE, &world, &self::device(), policy)?;
        let got = model.loss(0, 0, &self::device()).into_scalar::<f32>();
        assert!((got - exact).abs() <= 1e-6 * want.abs(), "{got}, {exact}");
        reset(&model)?;
        Ok(())
    });
}
