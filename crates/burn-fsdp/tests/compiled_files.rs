//! Compiled steps that are saved and resumed with one call each.

#[path = "common/save.rs"]
mod common;

use std::path::Path;

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp::checkpoint::snapshot;
use burn_fsdp::compile::{CompiledStep, Mode, compile, resume_compiled, save_compiled};
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward,
    fully_shard, launch, resume, save,
};

use common::save_taken;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: LayerNorm,
    second: Linear,
}

impl Net {
    /// Parameters of sizes that no number of ranks divides, with values that are not drawn.
    fn on(device: &Device) -> Self {
        let linear = |layer: Linear, from: usize| {
            let [rows, columns] = layer.weight.lazy_shape().dims();
            let value = |i: usize| ((i * 31 + from * 7) % 17) as f32 / 17.0 - 0.5;
            let values: Vec<f32> = (0..rows * columns).map(value).collect();
            let values = burn::tensor::TensorData::new(values, [rows, columns]);
            let weight = Tensor::from_data(values, device).set_require_grad(device.is_autodiff());
            Linear {
                weight: burn::module::Param::initialized(layer.weight.id, weight),
                ..layer
            }
        };
        let without_bias = |config: LinearConfig| config.with_bias(false).init(device);
        Self {
            first: linear(without_bias(LinearConfig::new(5, 7)), 1),
            norm: LayerNormConfig::new(7).init(device),
            second: linear(without_bias(LinearConfig::new(7, 3)), 2),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let hidden = self.norm.forward(self.first.forward(x)).tanh();
        self.second.forward(hidden).square().mean()
    }
}

type Step = CompiledStep<Tensor<2>, burn::backend::Flex>;

/// The rows of one rank: the same 12 rows on any number of ranks.
fn rows(step: u64, world: &ProcessGroup, device: &Device) -> Tensor<2> {
    let own = 12 / world.size();
    let value = |i: usize| ((i * 5 + step as usize * 3) % 11) as f32 / 11.0;
    let from = world.rank() * own * 5;
    let values: Vec<f32> = (from..from + own * 5).map(value).collect();
    Tensor::from_data(burn::tensor::TensorData::new(values, [own, 5]), device)
}

fn compiled(mode: Mode) -> Result<Step, Error> {
    let optimizer = AdamWConfig::new().with_epsilon(1e-2).build();
    Ok(compile(
        Net::on,
        |net: &Net, x: Tensor<2>| net.loss(x),
        optimizer,
        mode,
    )?)
}

fn mesh(world: &ProcessGroup, replicas: usize) -> Result<ProcessMesh, Error> {
    let axes = [("replicate", replicas), ("shard", world.size() / replicas)];
    Ok(ProcessMesh::new(world, Mesh::new(axes)?)?)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Engine {
    Compiled(Strategy),
    /// Compiled steps of two replicas.
    Hybrid,
    Eager,
}

/// Trains from the newest step of a folder to step `until`, saves, and returns the losses.
fn trained(engine: Engine, at: &Path, ranks: usize, until: u64) -> Vec<f64> {
    let at = at.to_owned();
    let done = launch(LaunchConfig::new(ranks), move |world| {
        let (mesh, mode) = match engine {
            Engine::Compiled(strategy) => {
                let mode = Mode::data_parallel(world.clone(), strategy);
                (mesh(&world, 1)?, mode)
            }
            Engine::Hybrid => {
                let mesh = mesh(&world, 2)?;
                let mode = Mode::hybrid(mesh.clone(), "replicate", Strategy::FullShard)?;
                (mesh, mode)
            }
            Engine::Eager => return eagerly(&world, &at, until),
        };
        let mut step = compiled(mode)?;
        let mut losses = Vec::new();
        for number in resume_compiled(&at, &mut step, &mesh)?..until {
            let batch = rows(number, &world, &Device::flex());
            losses.push(step.step(1e-2, &batch)?);
        }
        assert_eq!(save_compiled(&at, &mut step, &mesh)?.step, until);
        Ok::<_, Error>(losses)
    });
    let mut done = done.unwrap_or_else(|error| panic!("{error}"));
    done.swap_remove(0)
}

fn eagerly(world: &ProcessGroup, at: &Path, until: u64) -> Result<Vec<f64>, Error> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let model = fully_shard(Net::on(&device), world, ShardPolicy::new())?;
    let optimizer = AdamWConfig::new().with_epsilon(1e-2).init();
    let resumed = resume(at, model, optimizer, world)?;
    let (mut model, mut optimizer) = (resumed.model, resumed.optimizer);
    for number in resumed.step..until {
        let gradients = backward(model.loss(rows(number, world, &device)), &model)?;
        model = optimizer.step(1e-2, model, gradients);
    }
    save(at, until, &model, &optimizer, world)?;
    Ok(Vec::new())
}

#[test]
fn any_ranks_and_either_engine_continue_a_compiled_step() {
    use Engine::{Compiled, Eager, Hybrid};
    use Strategy::{FullShard, NoShard, ShardGradOp};
    let folder = || tempfile::tempdir().expect("a folder");
    let whole = trained(Compiled(NoShard), folder().path(), 1, 9);
    assert!(whole[8] < whole[0]);
    for parts in [
        [
            (Compiled(FullShard), 2),
            (Compiled(ShardGradOp), 3),
            (Compiled(NoShard), 1),
        ],
        [(Hybrid, 4), (Compiled(FullShard), 3), (Hybrid, 2)],
        [
            (Compiled(FullShard), 4),
            (Eager, 3),
            (Compiled(FullShard), 2),
        ],
        [(Eager, 2), (Hybrid, 4), (Compiled(ShardGradOp), 2)],
    ] {
        let at = folder();
        for (index, (engine, ranks)) in parts.into_iter().enumerate() {
            let losses = trained(engine, at.path(), ranks, 3 * (index as u64 + 1));
            let expected = &whole[3 * index..3 * index + 3];
            for (got, want) in losses.iter().zip(expected) {
                let what = format!("{parts:?}, part {index}");
                assert!((got / want - 1.0).abs() < 1e-5, "{what}: {got}, {want}");
            }
            assert_eq!(losses.len(), if engine == Eager { 0 } else { 3 });
        }
    }
}

#[test]
fn what_cannot_be_saved_is_refused_on_all_ranks() {
    let at = tempfile::tempdir().expect("a folder");
    let folder = at.path().to_owned();
    let all = launch(LaunchConfig::new(4), move |world| {
        let two = mesh(&world, 2)?;
        let mode = Mode::hybrid(two.clone(), "replicate", Strategy::FullShard)?;
        let mut step = compiled(mode)?;
        step.step(1e-2, &rows(0, &world, &Device::flex()))?;
        let refused = |error: Result<_, burn_fsdp::internals::checkpoint::CheckpointError>| {
            error
                .map(|_: burn_fsdp::internals::checkpoint::Saved| ())
                .expect_err("refused")
                .to_string()
        };
        // The axes of another mesh have the same names.
        let wrong = refused(save_compiled(&folder, &mut step, &mesh(&world, 1)?));
        assert!(
            wrong.contains("but the axis") && wrong.contains("has "),
            "{wrong}"
        );
        save_compiled(&folder, &mut step, &two)?;
        let again = refused(save_compiled(&folder, &mut step, &two));
        assert!(again.contains("step-"), "{again}");
        Ok::<_, Error>(())
    });
    all.unwrap_or_else(|error| panic!("{error}"));
}

/// A mesh whose axes have the same names and sizes, but whose ranks are in another order.
#[test]
fn a_mesh_in_another_order_is_refused_by_both_engines() {
    let at = tempfile::tempdir().expect("a folder");
    let folder = at.path().to_owned();
    let all = launch(LaunchConfig::new(4), move |world| {
        let own = mesh(&world, 2)?;
        let swapped = Mesh::new([("shard", 2), ("replicate", 2)])?;
        let swapped = ProcessMesh::new(&world, swapped)?;
        let refused = |error: String| assert!(error.contains("this rank holds"), "{error}");

        let mode = Mode::hybrid(own.clone(), "replicate", Strategy::FullShard)?;
        let mut step = compiled(mode)?;
        step.step(1e-2, &rows(0, &world, &Device::flex()))?;
        let saved = save_compiled(&folder, &mut step, &swapped);
        refused(saved.expect_err("refused").to_string());

        let device = Device::flex().autodiff().gradient_checkpointing();
        let model = fully_shard(Net::on(&device), &own, ShardPolicy::new())?;
        let mut optimizer = AdamWConfig::new().init();
        let gradients = backward(model.loss(rows(0, &world, &device)), &model)?;
        let model = optimizer.step(1e-2, model, gradients);
        let saved = save(&folder, 1, &model, &optimizer, &swapped);
        refused(saved.expect_err("refused").to_string());
        // The axis of the replicas has as many ranks as the axis of the shards.
        let taken = snapshot(&model, &optimizer, own.mesh(), "replicate")?;
        let saved = save_taken(&folder, world, taken, 1);
        refused(saved.expect_err("refused").to_string());

        save(&folder, 1, &model, &optimizer, &own)?;
        save_compiled(folder.join("compiled"), &mut step, &own)?;
        Ok::<_, Error>(())
    });
    all.unwrap_or_else(|error| panic!("{error}"));
}
