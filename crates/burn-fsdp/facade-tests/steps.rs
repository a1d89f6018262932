//! Steps of a real training: saved by N ranks, loaded by M.

use std::path::Path;
use std::sync::Arc;

use burn::grad_clipping::GradientClipping;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::internals::checkpoint::{
    Alone, Existing, SaveRequest, Snapshot, Step, TensorKind, TrainingState, restore_matching,
    restore_model, save_step,
};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::optim::FileBackedOptimizer;
use burn_fsdp::sharding::Cut;
use burn_fsdp::state::summon_full_params;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, backward, fully_shard,
    launch,
};
use burn_fsdp_models::{Gpt, GptConfig};

use crate::common::{CONFIG, device, loss, optimizer, trained_plainly};
use crate::saving::save_taken;

fn sharded(world: &ProcessGroup, device: &Device, cut: Cut) -> Result<(ProcessMesh, Gpt), Error> {
    let mesh = Mesh::line("shard", world.size())?;
    let mesh = ProcessMesh::new(world, mesh)?;
    let model = CONFIG.init(device, 4).expect("valid");
    let policy = ShardPolicy::new().units(["blocks.*"]).cut(cut);
    Ok((mesh.clone(), fully_shard(model, &mesh, policy)?))
}

/// Paths and bytes of tensors.
type Tensors = Vec<(String, Vec<u8>)>;

/// The float parameters of a plain module.
fn parameters<M: Module>(model: &M) -> Tensors {
    let mut found = Parameters::default();
    model.visit(&mut found);
    found.found.sort();
    found.found
}

#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    found: Tensors,
}

impl ModuleVisitor for Parameters {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let bytes = param.val().into_data().as_bytes().to_vec();
        self.found.push((self.path.join("."), bytes));
    }
}

/// Saves as step `step`. The ranks meet over `group`.
fn write<M: Module>(
    group: ProcessGroup,
    mesh: &ProcessMesh,
    model: &M,
    optim: &ModuleOptimizer,
    step: u64,
    folder: &Path,
) -> Result<(), Error> {
    let taken = snapshot(model, optim, mesh.mesh(), "shard")?;
    save_taken(folder, group, taken, step)
}

/// A group for only the saves.
fn apart(world: &ProcessGroup) -> Result<ProcessGroup, Error> {
    Ok(world.split(0, world.rank(), "checkpoints")?)
}

/// Trains two steps and saves. Every rank trains on the same batch, so the values depend on the number of
/// ranks only by rounding, and not at all if the number is a power of two. Returns the whole parameters as in
/// a record of the module.
fn save_at(ranks: usize, cut: Cut, folder: &Path) -> Tensors {
    let folder = Arc::new(folder.to_owned());
    let seen = launch(LaunchConfig::new(ranks), move |world| {
        let device = device();
        let (mesh, mut model) = sharded(&world, &device, cut)?;
        let mut optim = optimizer();
        for step in 0..2 {
            let gradients = backward(loss(&model, step, &device), &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        write(apart(&world)?, &mesh, &model, &optim, 2, &folder)?;
        let plain = CONFIG.init(&device, 5).expect("valid");
        let whole = plain.load_record(model.into_record());
        Ok::<_, Error>(parameters(&whole))
    });
    seen.unwrap_or_else(|error| panic!("{error}"))
        .swap_remove(0)
}

/// Every tensor of a step, whole.
fn saved(step: &Step) -> Tensors {
    let tensors = step.index().tensors.iter();
    let whole = tensors.map(|tensor| {
        let all = Region::Flat(0..tensor.shape.iter().product());
        (
            tensor.name.clone(),
            step.read(&tensor.name, &all).expect("whole"),
        )
    });
    whole.collect()
}

#[test]
fn steps_move_between_rank_counts_bit_for_bit() {
    let plain = parameters(&trained_plainly(2).0);
    let mut states_of_one = None;
    for (n, save_layout, load_layout) in (1..=8).map(|n| match n % 2 {
        0 => (n, Cut::Elements, Cut::Dims),
        _ => (n, Cut::Dims, Cut::Elements),
    }) {
        let folder = tempfile::tempdir().expect("a folder");
        let recorded = save_at(n, save_layout, folder.path());
        let want = Arc::new(saved(
            &Checkpoints::new(folder.path()).newest().expect("saved"),
        ));
        let is_state = |(name, _): &&(String, Vec<u8>)| name.starts_with("optimizer.");
        let mut in_file: Vec<_> = want
            .iter()
            .filter(|tensor| !is_state(tensor))
            .cloned()
            .collect();
        in_file.sort();
        assert!(
            in_file == recorded,
            "saved at {n}: the record of the module"
        );
        // All ranks have the same rows: sums of up to four equal addends are exact when divided again.
        if [1, 2, 4].contains(&n) {
            assert!(in_file == plain, "saved at {n}: the plain model");
            // Continuing the training with the states of one rank proves them.
            let states: Tensors = want.iter().filter(is_state).cloned().collect();
            let of_one = states_of_one.get_or_insert_with(|| states.clone());
            assert!(states == *of_one, "saved at {n}: the states of one rank");
        }
        let kinds = |kind| {
            want.iter()
                .filter(move |(name, _)| name.starts_with("optimizer.") == kind)
        };
        assert_eq!(kinds(true).count(), 2 * kinds(false).count());
        for m in 1..=8 {
            for layout in [save_layout, load_layout] {
                let from = folder.path().to_owned();
                let to = tempfile::tempdir().expect("a folder");
                let again = to.path().to_owned();
                let resumed = launch(LaunchConfig::new(m), move |world| {
                    let device = device();
                    let (mesh, model) = sharded(&world, &device, layout)?;
                    let step = Checkpoints::new(&from).newest()?;
                    let (model, optim) = restore(model, optimizer(), &step)?;
                    let taken = snapshot(&model, &optim, mesh.mesh(), "shard")?;
                    assert_eq!(taken.optimizer, step.index().training.optimizer);
                    // The loaded state, saved again.
                    write(world, &mesh, &model, &optim, 2, &again)?;
                    Ok::<_, Error>(())
                });
                resumed.unwrap_or_else(|error| panic!("{error}"));
                let got = saved(&Checkpoints::new(to.path()).newest().expect("saved"));
                assert!(got == *want, "saved at {n}, loaded at {m}");
            }
        }
    }
}

/// One rank of a plain model, and the next steps after resuming.
#[test]
fn one_rank_saves_the_plain_model_and_resumes() {
    let (plain, losses) = trained_plainly(4);
    let want = parameters(&plain);
    let folder = tempfile::tempdir().expect("a folder");
    save_at(1, Cut::Elements, folder.path());
    let from = folder.path().to_owned();
    launch(LaunchConfig::new(1), move |world| {
        let device = device();
        let (_, model) = sharded(&world, &device, Cut::Elements)?;
        let step = Checkpoints::new(&from).newest()?;
        let (mut model, mut optim) = restore(model, optimizer(), &step)?;
        for (step, want) in (0..).zip(&losses).skip(2) {
            let loss = loss(&model, step, &device);
            let got = loss.clone().into_scalar::<f32>();
            assert_eq!(got.to_bits(), want.to_bits(), "step {step}");
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        summon_full_params(model, burn_fsdp::state::WriteBack::Discard, |full: Gpt| {
            assert!(parameters(&full) == want, "bits of the plain model");
            full
        })?;
        Ok::<_, Error>(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_step_of_another_model_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    save_at(2, Cut::Elements, folder.path());
    let from = folder.path().to_owned();
    let message = launch(LaunchConfig::new(1), move |world| {
        let device = Device::flex().autodiff();
        let mesh = Mesh::line("shard", 1)?;
        let mesh = ProcessMesh::new(&world, mesh)?;
        let model = GptConfig { dim: 8, ..CONFIG }
            .init(&device, 4)
            .expect("valid");
        let model = fully_shard(model, &mesh, ShardPolicy::new())?;
        let step = Checkpoints::new(&from).newest()?;
        let refused = restore(model, optimizer(), &step).err();
        Ok::<_, Error>(refused.map(|error| error.to_string()))
    });
    let message = message.unwrap_or_else(|error| panic!("{error}"));
    let message = message[0].clone().unwrap_or_default();
    assert!(message.contains("wte.weight"), "{message}");
}

#[test]
fn a_part_may_be_loaded_by_path() {
    let folder = tempfile::tempdir().expect("a folder");
    save_at(2, Cut::Elements, folder.path());
    let from = folder.path().to_owned();
    launch(LaunchConfig::new(3), move |world| {
        let device = device();
        let (_, model) = sharded(&world, &device, Cut::Elements)?;
        let step = Checkpoints::new(&from).newest()?;
        let before = burn_fsdp::internals::state::local_state(&model)?;
        let model = restore_matching(model, &step, |path| path.starts_with("blocks.1."))?;
        let after = burn_fsdp::internals::state::local_state(&model)?;
        for (before, after) in before.iter().zip(&after) {
            let changed = before.elements.as_bytes() != after.elements.as_bytes();
            let trained = !after.elements.is_empty();
            let wanted = after.path.starts_with("blocks.1.") && trained;
            assert_eq!(changed, wanted, "{}", after.path);
        }
        Ok::<_, Error>(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
}

/// A shard over 16 MiB is cut into chunks and comes back whole.
#[test]
fn large_shards_round_trip() {
    let folder = tempfile::tempdir().expect("a folder");
    let mesh = Mesh::line("shard", 1).expect("one rank");
    let layout = burn_fsdp::internals::mesh::Layout::flat(&mesh, "shard").expect("an axis");
    let elements = (17 << 20) / 4 + 3;
    let spec = burn_fsdp::internals::checkpoint::TensorSpec::new(
        "large",
        [elements],
        burn_fsdp::internals::checkpoint::Dtype::F32,
        TensorKind::Parameter,
        layout,
    );
    let plan = Arc::new(
        burn_fsdp::internals::checkpoint::WritePlan::new(&mesh, vec![spec]).expect("a plan"),
    );
    let bytes: Vec<u8> = (0..4 * elements).map(|i| (i * 31 % 251) as u8).collect();
    let mut snapshot = Snapshot::new();
    snapshot.insert("large", Region::Flat(0..elements), bytes.clone());
    let request = SaveRequest {
        existing: Existing::Refuse,
        ..SaveRequest::new(plan, TrainingState::default())
    };
    let checkpoints = Checkpoints::new(folder.path());
    save_step(&checkpoints, &request, &mut snapshot, &mut Alone).expect("saved");
    let step = checkpoints.newest().expect("saved");
    let got = step
        .read("large", &Region::Flat(0..elements))
        .expect("read");
    assert!(got == bytes);
}

fn line(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

/// Flips a bit in the last tensor of every file.
fn damage(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            damage(&path);
        } else if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            let mut bytes = std::fs::read(&path).expect("a file");
            *bytes.last_mut().expect("elements") ^= 1;
            std::fs::write(&path, bytes).expect("a file");
        }
    }
}

#[test]
fn a_damaged_step_changes_no_copy_of_the_model() {
    let folder = tempfile::tempdir().expect("a folder");
    save_at(2, Cut::Elements, folder.path());
    damage(folder.path());
    let from = folder.path().to_owned();
    launch(LaunchConfig::new(2), move |world| {
        let device = device();
        let (_, model) = sharded(&world, &device, Cut::Elements)?;
        let bytes = |model: &Gpt| -> Result<Vec<Vec<u8>>, Error> {
            let state = burn_fsdp::internals::state::local_state(model)?.into_iter();
            Ok(state
                .map(|tensor| tensor.elements.as_bytes().to_vec())
                .collect())
        };
        let before = bytes(&model)?;
        let step = Checkpoints::new(&from).newest()?;
        let refused = restore(model.clone(), optimizer(), &step)
            .err()
            .expect("damaged");
        assert!(refused.to_string().contains("damaged"), "{refused}");
        // Training continues with the remaining copy: a learning rate of 0 changes nothing.
        let gradients = backward(loss(&model, 0, &device), &model)?;
        let model = SgdConfig::new().init().step(0.0, model, gradients);
        assert!(bytes(&model)? == before);
        Ok::<_, Error>(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
}

#[derive(Module, Debug)]
struct Counting {
    layer: Linear,
    norm: BatchNorm,
    usage: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

fn counting(device: &Device, usage: i64) -> Counting {
    Counting {
        layer: LinearConfig::new(4, 4).init(device),
        norm: BatchNormConfig::new(4).init(device),
        usage: Param::initialized(ParamId::new(), Tensor::from_data([usage, 9], device)),
        mask: Param::initialized(ParamId::new(), Tensor::from_data([usage > 5, true], device)),
    }
}

/// Integers and booleans are restored; rank 0's values are used for everything that differs by rank.
#[test]
fn values_that_differ_by_rank_are_saved_from_rank_0() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_owned();
    let seen = launch(LaunchConfig::new(3), move |world| {
        let device = device();
        let mesh = line(&world)?;
        let model = fully_shard(
            counting(&device, 7 + world.rank() as i64),
            &mesh,
            ShardPolicy::new(),
        )?;
        for step in 0..2 {
            let x = Tensor::<2>::ones([6, 4], &device) * (1 + step + world.rank() as i64);
            let x = model.layer.forward(x).reshape([6, 4, 1]);
            backward(model.norm.forward(x).sum(), &model)?;
        }
        let own = |model: &Counting| {
            let running = [&model.norm.running_mean, &model.norm.running_var];
            let running = running.map(|state| state.value_sync().into_data());
            let usage = model.usage.val().into_data().convert::<i64>();
            (running, usage, model.mask.val().into_data())
        };
        write(apart(&world)?, &mesh, &model, &optimizer(), 1, &path)?;
        let fresh = fully_shard(counting(&device, 0), &mesh, ShardPolicy::new())?;
        let step = Checkpoints::new(&path).newest()?;
        let fresh = restore_model(fresh, &step)?;
        Ok::<_, Error>((own(&model), own(&fresh)))
    })
    .unwrap_or_else(|error| panic!("{error}"));
    assert_ne!(seen[0].0, seen[1].0, "ranks differ");
    for (_, restored) in &seen {
        assert_eq!(*restored, seen[0].0);
    }
}

/// The optimizer is not checked explicitly, but saving or restoring notices it.
#[test]
fn optimizers_of_whole_tensors_are_detected() {
    let folder = tempfile::tempdir().expect("a folder");
    save_at(2, Cut::Elements, folder.path());
    let from = folder.path().to_owned();
    launch(LaunchConfig::new(2), move |world| {
        let device = device();
        let clips = || optimizer().with_grad_clipping(GradientClipping::Norm(0.05));
        let (mesh, model) = sharded(&world, &device, Cut::Elements)?;
        let step = Checkpoints::new(&from).newest()?;
        let refused = [
            snapshot(&model, &clips(), mesh.mesh(), "shard").err(),
            restore(model.clone(), clips(), &step).err(),
        ];
        for error in refused {
            let message = error.expect("refused").to_string();
            assert!(message.contains("clip_grad_norm"), "{message}");
        }
        let scratch = tempfile::tempdir().expect("a folder");
        let mut optim = FileBackedOptimizer::new(clips(), scratch.path(), world.rank())?;
        let gradients = backward(loss(&model, 0, &device), &model)?;
        let error = optim.step(1e-2, model, gradients).expect_err("refused");
        assert!(error.to_string().contains("clip_grad_norm"), "{error}");
        Ok::<_, Error>(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
}
