//! Initial values that each rank reads for itself, and values in the layout before the first graph.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Device, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::{Mesh, Placement, Region};
use burn_fsdp_spmd::{
    CompiledStep, DataParallel, Error, Expand, Mode, OptimizerState, ShardSpec, Strategy, compile,
    compile_from,
};

use crate::compiled::seeded;
use crate::eager::{self, adamw, floats};
use crate::models::{Gpt, TokenBatch, tokens};

const STEPS: usize = 4;
const ROWS: usize = 12;

type Values = Arc<BTreeMap<String, TensorData>>;

/// The initial values of the oracle.
fn values() -> Values {
    let device = Device::flex();
    device.seed(1);
    Arc::new(floats(&Gpt::new(&device)))
}

fn mesh(world: &ProcessGroup, axes: [(&str, usize); 2]) -> Result<ProcessMesh, Error> {
    ProcessMesh::new(world, Mesh::new(axes)?).map_err(|source| Error::Collective {
        node: 0,
        source: Arc::new(source),
    })
}

/// Returns the modes for that many ranks, by name.
fn modes(world: &ProcessGroup) -> Result<Vec<(&'static str, Mode)>, Error> {
    let data_parallel = |style: DataParallel| Mode::data_parallel(world.clone(), style);
    let columns = Expand::new()
        .parameter("blocks.*.fc.weight", "model", Placement::Shard(1))
        .parameter("blocks.*.out.weight", "model", Placement::Shard(0))
        .parameter("wte.weight", "model", Placement::Shard(0))
        .input("**", "data", Placement::Shard(0));
    let mut modes = vec![
        ("no-shard", data_parallel(Strategy::NoShard.into())),
        ("full-shard", data_parallel(Strategy::FullShard.into())),
        ("automatic", data_parallel(DataParallel::Automatic)),
        (
            "placements",
            Mode::expand(
                mesh(world, [("data", 1), ("model", world.size())])?,
                columns,
            ),
        ),
    ];
    if world.size() == 4 {
        let mesh = mesh(world, [("replicate", 2), ("shard", 2)])?;
        modes.push((
            "hybrid",
            Mode::hybrid(mesh, "replicate", Strategy::FullShard)?,
        ));
    }
    Ok(modes)
}

/// Returns the elements of a region of a tensor.
fn part(data: &TensorData, region: &Region) -> Vec<f32> {
    let all = data.try_to_vec::<f32>().unwrap();
    match region {
        Region::Flat(range) => all[range.clone()].to_vec(),
        Region::Box { offsets, sizes } => {
            let width = data.shape()[1];
            let rows = offsets[0]..offsets[0] + sizes[0];
            let of_row = |row: usize| {
                let start = row * width + offsets[1];
                all[start..start + sizes[1]].to_vec()
            };
            rows.flat_map(of_row).collect()
        }
    }
}

fn read(values: &Values, shard: &ShardSpec<'_>) -> Result<Option<TensorData>, Error> {
    let whole = &values[&*shard.whole.path];
    assert_eq!(whole.shape().to_vec(), shard.whole.shape);
    let elements = part(whole, &shard.region);
    Ok(Some(TensorData::new(elements, shard.shape.clone())))
}

/// Returns this rank's rows of the joined batch: all of them if the placements do not cut it.
fn rows(name: &str, world: &ProcessGroup, step: usize) -> TokenBatch {
    let device = Device::flex();
    let rows = ROWS / world.size();
    match name {
        "placements" => tokens(step, 0, ROWS, &device),
        _ => tokens(step, world.rank() * rows, rows, &device),
    }
}

#[test]
fn values_read_by_ranks_train_like_one_ranks_values() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
    let values = values();
    for num_ranks in [1, 2, 3, 4] {
        let (values, losses) = (values.clone(), expected.losses.clone());
        let body = move |world: ProcessGroup| -> Result<(), Error> {
            for (name, mode) in modes(&world)? {
                let what = format!("{name} on {num_ranks} ranks");
                // Values that must not appear: `init` draws others.
                Device::flex().seed(99);
                let read = |shard: &ShardSpec<'_>| read(&values, shard);
                let mut step = compile_from(Gpt::new, read, Gpt::loss, adamw().build(), mode)?;
                for (path, whole) in &*values {
                    assert_eq!(step.parameter(path)?, *whole, "{what}: {path}");
                }
                for (index, expected) in losses.iter().enumerate() {
                    let loss = step.step(1e-2, &rows(name, &world, index))?;
                    let difference = (loss - f64::from(*expected)).abs() / f64::from(*expected);
                    assert!(difference <= 1e-5, "{what}: {loss} is not {expected}");
                }
            }
            Ok(())
        };
        launch(LaunchConfig::new(num_ranks), body).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn unread_values_are_rank_0s_and_mismatched_parts_are_rejected() {
    let _guard = seeded();
    let values = values();
    let body = move |world: ProcessGroup| -> Result<(), Error> {
        Device::flex().seed(1);
        let mode = || Mode::data_parallel(world.clone(), Strategy::FullShard);
        let some = |shard: &ShardSpec<'_>| {
            if shard.whole.path.starts_with("blocks.1") {
                read(&values, shard)
            } else {
                Ok(None)
            }
        };
        let mut step = compile_from(Gpt::new, some, Gpt::loss, adamw().build(), mode())?;
        let paths: Vec<_> = values.keys().collect();
        for path in paths {
            // The ranks are threads of one process, and only rank 0 draws. It does not draw values that are read.
            let is_read = path.starts_with("blocks.1");
            let got = step.parameter(path)?;
            assert!(!is_read || got == values[path], "{path}");
            let of_first = world.exchange("parameter", got.as_bytes().to_vec());
            assert!(
                of_first.unwrap().iter().all(|of| **of == *got.as_bytes()),
                "{path}"
            );
        }
        let other_shape = |shard: &ShardSpec<'_>| {
            let len = shard.region.len();
            Ok::<_, Error>(Some(TensorData::new(vec![0f32; len + 1], [len + 1])))
        };
        let refused = compile_from(Gpt::new, other_shape, Gpt::loss, adamw().build(), mode());
        let text = refused.expect_err("of another shape").to_string();
        assert!(text.contains("wte.weight"), "{text}");
        let other_type = |shard: &ShardSpec<'_>| {
            let zeros = vec![0f64; shard.region.len()];
            Ok::<_, Error>(Some(TensorData::new(zeros, shard.shape.clone())))
        };
        let refused = compile_from(Gpt::new, other_type, Gpt::loss, adamw().build(), mode());
        let text = refused.expect_err("of another type").to_string();
        assert!(text.contains("F64"), "{text}");
        Ok(())
    };
    launch(LaunchConfig::new(3), body).unwrap_or_else(|error| panic!("{error}"));
}

type Step = CompiledStep<TokenBatch>;

fn automatic(world: &ProcessGroup) -> Result<Step, Error> {
    Device::flex().seed(1);
    let mode = Mode::data_parallel(world.clone(), DataParallel::Automatic).verified();
    compile(Gpt::new, Gpt::loss, adamw().build(), mode)
}

/// Returns the part of a whole that a layout gives this rank.
fn cut(step: &Step, path: &str, whole: &TensorData) -> TensorData {
    let (layout, mesh) = (step.layout(path).unwrap(), step.mesh().unwrap());
    let shape = whole.shape().to_vec();
    let region = layout.region(&shape, &mesh, step.rank()).unwrap();
    let shape = layout.part_shape(&shape, &mesh, step.rank()).unwrap();
    TensorData::new(part(whole, &region), shape)
}

/// Before the first graph decides the placements, parameters and states are set in flat shards. The graph then
/// redistributes them.
#[test]
fn automatic_placements_resume_from_flat_shards() {
    let _guard = seeded();
    for num_ranks in [1, 2, 3, 4] {
        let body = move |world: ProcessGroup| -> Result<(), Error> {
            let mut first = automatic(&world)?;
            for index in 0..2 {
                first.step(1e-2, &rows("automatic", &world, index))?;
            }
            let mut parameters = BTreeMap::new();
            let mut states = Vec::new();
            for spec in first.parameters().to_vec() {
                parameters.insert(spec.path.to_string(), first.parameter(&spec.path)?);
                let counters = first.counters(&spec.path).unwrap_or_default().to_vec();
                states.push((spec.path.to_string(), counters, first.states(&spec.path)?));
            }
            let mut second = automatic(&world)?;
            for (path, whole) in &parameters {
                let is_flat = second.layout(path)?.is_whole();
                assert!(!is_flat, "{path} is whole before there is a graph");
                let shard = cut(&second, path, whole);
                assert_eq!(shard.dtype(), DType::F32);
                second.set_shard(path, shard)?;
                assert_eq!(second.parameter(path)?, *whole, "{path}");
            }
            let states = states.into_iter().map(|(path, counters, wholes)| {
                let cut = |(name, whole)| (name, cut(&second, &path, &whole));
                let tensors = wholes.into_iter().map(cut).collect();
                OptimizerState {
                    path,
                    counters,
                    tensors,
                }
            });
            let states = states.collect();
            second.resume_with(2, states)?;
            for index in 2..4 {
                let batch = rows("automatic", &world, index);
                let (expected, got) = (first.step(1e-2, &batch)?, second.step(1e-2, &batch)?);
                assert_eq!(got.to_bits(), expected.to_bits(), "step {index}");
            }
            for path in parameters.keys() {
                assert_eq!(second.layout(path)?, first.layout(path)?, "{path}");
                assert_eq!(second.shard(path)?, first.shard(path)?, "{path}");
                for (got, expected) in second.states(path)?.iter().zip(first.states(path)?) {
                    assert_eq!(*got, expected, "{path}");
                }
            }
            Ok(())
        };
        launch(LaunchConfig::new(num_ranks), body).unwrap_or_else(|error| panic!("{error}"));
    }
}
