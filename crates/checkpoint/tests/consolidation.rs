//! Conversion of a sharded step to plain safetensors.

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use burn_fsdp_checkpoint::storage::{Memory, Storage};
use burn_fsdp_checkpoint::{
    Checkpoints, ConsolidationConfig, Dtype, Error, Inspection, Layout, PlainTensor, Region, Step,
    TensorEntry, TensorKind, TensorSpec, WritePlan, consolidate_to_file, consolidate_to_folder,
};
use common::{KINDS, Kind};
use safetensors::SafeTensors;

fn saved(memory: &Memory, kind: Kind) -> Step {
    let checkpoints = Checkpoints::with_storage(Arc::new(memory.clone()), "run");
    common::save_step(&checkpoints, &common::plan(&common::line(3), kind), 1);
    checkpoints.newest().expect("opens")
}

fn model() -> Vec<TensorSpec> {
    let tensors = common::tensors(&common::line(3), Kind::Flat);
    tensors
        .into_iter()
        .filter(|tensor| tensor.kind.is_model())
        .collect()
}

fn assert_tensor(file: &SafeTensors<'_>, tensor: &TensorSpec) {
    let view = file.tensor(&tensor.name).expect("there");
    assert_eq!(view.shape(), tensor.shape);
    assert_eq!(view.dtype(), tensor.dtype);
    let whole = Region::whole(&tensor.shape);
    assert_eq!(
        view.data(),
        common::part_of(tensor, &whole),
        "{}",
        tensor.name
    );
}

#[test]
fn one_file_has_the_model_and_nothing_else() {
    for kind in KINDS {
        let memory = Memory::new();
        let step = saved(&memory, kind);
        let out = Path::new("out/model.safetensors");
        let config = ConsolidationConfig::default();
        let done = consolidate_to_file(&step, out, &config, |tensor| {
            Some(PlainTensor::unchanged(tensor))
        })
        .expect("writes");
        let bytes = memory.read(out).expect("there");
        let file = SafeTensors::deserialize(&bytes).expect("reads");
        assert_eq!(file.len(), model().len());
        for tensor in model() {
            assert_tensor(&file, &tensor);
        }
        let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("reads");
        let metadata = metadata.metadata().as_ref().expect("some");
        assert_eq!(metadata["format"], "pt");
        assert_eq!(done.num_tensors, model().len());
        assert_eq!(
            done.total_size,
            model().iter().map(common::num_bytes).sum::<usize>() as u64
        );

        let error = consolidate_to_file(&step, out, &config, |tensor| {
            Some(PlainTensor::unchanged(tensor))
        });
        assert!(matches!(error, Err(Error::Exists { .. })));
        // A file never replaces a folder, regardless of the configuration.
        let replace = ConsolidationConfig {
            replace: true,
            ..ConsolidationConfig::default()
        };
        let error = consolidate_to_file(&step, Path::new("out"), &replace, |tensor| {
            Some(PlainTensor::unchanged(tensor))
        });
        assert!(matches!(
            error,
            Err(Error::Argument {
                argument: "out",
                ..
            })
        ));
        let config = ConsolidationConfig {
            replace: true,
            ..config
        };
        consolidate_to_file(&step, out, &config, |tensor| {
            (tensor.name == "scalar").then(|| PlainTensor::unchanged(tensor))
        })
        .expect("writes");
        let bytes = memory.read(out).expect("there");
        let file = SafeTensors::deserialize(&bytes).expect("reads");
        assert_eq!(file.names(), ["scalar"]);
        consolidate_to_file(&step, out, &config, |_| None).expect_err("nothing to write");
        let left: Vec<_> = memory.list(Path::new("out")).expect("there");
        assert_eq!(left.len(), 1, "{left:?}");
    }
}

#[test]
fn folders_are_sharded_like_hugging_face() {
    let memory = Memory::new();
    let step = saved(&memory, Kind::Columns);
    for max in [1, 100, 200, 500, 1 << 20] {
        let out = Path::new("out").join(max.to_string());
        let config = ConsolidationConfig {
            max_shard_size: Some(max),
            ..ConsolidationConfig::default()
        };
        let done = consolidate_to_folder(&step, &out, &config, |tensor| {
            Some(PlainTensor::unchanged(tensor))
        })
        .expect("writes");
        let total = done.files.len();
        let mut found = BTreeSet::new();
        for (number, path) in done.files.iter().enumerate() {
            let name = match total {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{total:05}.safetensors", number + 1),
            };
            assert_eq!(path, &out.join(name));
            let bytes = memory.read(path).expect("there");
            let file = SafeTensors::deserialize(&bytes).expect("reads");
            let size: usize = file.iter().map(|(_, view)| view.data().len()).sum();
            assert!(
                size as u64 <= max
                    || file.iter().filter(|(_, v)| !v.data().is_empty()).count() == 1
            );
            for tensor in model()
                .iter()
                .filter(|tensor| file.tensor(&tensor.name).is_ok())
            {
                assert_tensor(&file, tensor);
                assert!(found.insert(tensor.name.clone()), "twice");
            }
        }
        assert_eq!(found.len(), model().len());
        let index = memory.read(&out.join("model.safetensors.index.json"));
        assert_eq!(index.is_some(), total > 1);
        if let Some(index) = index {
            let index: serde_json::Value = serde_json::from_slice(&index).expect("JSON");
            assert_eq!(index["metadata"]["total_size"], done.total_size);
            let map = index["weight_map"].as_object().expect("a map");
            assert!(map.keys().eq(&found));
        }
        let error = consolidate_to_folder(&step, &out, &config, |tensor| {
            Some(PlainTensor::unchanged(tensor))
        });
        assert!(matches!(error, Err(Error::Exists { .. })));
    }
}

/// Returns the transpose, element by element.
fn transposed(bytes: &[u8], [rows, columns]: [usize; 2], item_bytes: usize) -> Vec<u8> {
    let element = |row: usize, column: usize| {
        let start = (row * columns + column) * item_bytes;
        bytes[start..start + item_bytes].to_vec()
    };
    (0..columns)
        .flat_map(|column| (0..rows).flat_map(move |row| element(row, column)))
        .collect()
}

#[test]
fn folders_may_have_other_files_and_names() {
    let memory = Memory::new();
    let step = saved(&memory, Kind::Flat);
    let config = |name: &str, file_name: &str| ConsolidationConfig {
        max_shard_size: Some(1),
        file_name: file_name.to_owned(),
        beside: vec![(name.to_owned(), b"{}".to_vec())],
        ..ConsolidationConfig::default()
    };
    let write = |config: &ConsolidationConfig| {
        let unchanged = |tensor: &TensorEntry| Some(PlainTensor::unchanged(tensor));
        consolidate_to_folder(&step, Path::new("out"), config, unchanged)
    };
    for (name, file_name) in [
        ("../config.json", "model"),
        (".config.json", "model"),
        ("", "model"),
        ("config.json", "a/model"),
    ] {
        let error = write(&config(name, file_name)).expect_err("a path");
        assert!(matches!(error, Error::Argument { .. }), "{error}");
        assert!(!memory.exists(Path::new("out")).expect("readable"));
    }
    write(&config("config.json", "adapter_model")).expect("writes");
    let read = |name: &str| memory.read(&Path::new("out").join(name));
    assert_eq!(read("config.json").expect("there"), b"{}");
    assert!(read("adapter_model.safetensors.index.json").is_some());
    let first = format!("adapter_model-00001-of-{:05}.safetensors", model().len());
    assert!(read(&first).is_some());
}

#[test]
fn matrices_are_renamed_and_transposed_with_any_memory_limit() {
    for kind in KINDS {
        let memory = Memory::new();
        let step = saved(&memory, kind);
        let matrices = model().into_iter().filter(|tensor| tensor.shape.len() == 2);
        let matrices: Vec<_> = matrices.collect();
        assert!(matrices.len() > 1);
        // From less than a column to everything.
        for transpose_bytes in [0, 24, 60, 1 << 20] {
            let out = Path::new("out/model.safetensors");
            let config = ConsolidationConfig {
                replace: true,
                transpose_bytes,
                ..ConsolidationConfig::default()
            };
            let done = consolidate_to_file(&step, out, &config, |tensor| {
                (tensor.shape.len() == 2).then(|| PlainTensor {
                    name: format!("turned.{}", tensor.name),
                    is_transposed: true,
                })
            });
            assert_eq!(done.expect("writes").num_tensors, matrices.len());
            let bytes = memory.read(out).expect("there");
            let file = SafeTensors::deserialize(&bytes).expect("reads");
            for tensor in &matrices {
                let view = file.tensor(&format!("turned.{}", tensor.name));
                let view = view.expect("there");
                let [rows, columns] = tensor.shape[..] else {
                    panic!("a matrix")
                };
                assert_eq!(view.shape(), [columns, rows]);
                let whole = common::part_of(tensor, &Region::whole(&tensor.shape));
                let item_bytes = tensor.dtype.bitsize() / 8;
                let want = transposed(&whole, [rows, columns], item_bytes);
                assert!(view.data() == want, "{} {transpose_bytes}", tensor.name);
            }
        }
    }
}

#[test]
fn unwritable_tensors_are_named_in_the_error() {
    let memory = Memory::new();
    let step = saved(&memory, Kind::Flat);
    let out = Path::new("out/model.safetensors");
    let config = ConsolidationConfig::default();
    let named = |name: &str, is_transposed| {
        let name = name.to_owned();
        PlainTensor {
            name,
            is_transposed,
        }
    };
    for (plain, text) in [
        (named("same", false), "\"same\" again"),
        (named("", false), "its name must be"),
        (named("__metadata__", false), "its name must be"),
    ] {
        let error = consolidate_to_file(&step, out, &config, |_| Some(plain.clone()));
        let error = error.expect_err("refused").to_string();
        assert!(error.contains(text), "{error}");
    }
    let error = consolidate_to_file(&step, out, &config, |tensor| {
        Some(PlainTensor {
            is_transposed: true,
            ..PlainTensor::unchanged(tensor)
        })
    });
    let error = error.expect_err("refused").to_string();
    assert!(error.contains("two dims"), "{error}");
    assert!(!memory.exists(out).expect("in memory"));
}

#[test]
fn damage_leaves_no_output() {
    let memory = Memory::new();
    let step = saved(&memory, Kind::Flat);
    let path = step.path().join("rank-00002.safetensors");
    let mut bytes = memory.read(&path).expect("there");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    memory.write(&path, bytes).expect("in memory");
    let config = ConsolidationConfig::default();
    let out = Path::new("out/model");
    // The last part in the file has the narrowest elements, which belong to the model.
    let error = consolidate_to_folder(&step, out, &config, |tensor| {
        Some(PlainTensor::unchanged(tensor))
    })
    .expect_err("damaged");
    assert!(error.is_damage(), "{error}");
    consolidate_to_file(&step, out, &config, |tensor| {
        Some(PlainTensor::unchanged(tensor))
    })
    .expect_err("damaged");
    assert_eq!(memory.list(Path::new("out")).expect("there").len(), 0);
}

#[test]
fn large_tensors_pass_through_in_blocks() {
    let mesh = common::line(2);
    let layout = Layout::dim(&mesh, "shard", 1).expect("an axis");
    let shape = [1500, 4001];
    let tensor = TensorSpec::new("big", shape, Dtype::F32, TensorKind::Parameter, layout);
    let plan = Arc::new(WritePlan::new(&mesh, vec![tensor.clone()]).expect("fits"));
    let dir = tempfile::tempdir().expect("a folder");
    let checkpoints = Checkpoints::new(dir.path().join("run"));
    let request = common::request(&plan, 1);
    let whole = common::truth("big", common::num_bytes(&tensor));
    // Cut out by hand, because the definition in `common` is slow for this size.
    let source =
        |tensor: &TensorSpec, region: &Region| -> Result<Vec<u8>, burn_fsdp_checkpoint::BoxError> {
            let Region::Box { offsets, sizes } = region else {
                panic!("shards of dim 1 are boxes");
            };
            let rows = whole.chunks(tensor.shape[1] * 4);
            let row = |row: &[u8]| row[offsets[1] * 4..(offsets[1] + sizes[1]) * 4].to_vec();
            Ok(rows.flat_map(row).collect())
        };
    let ends = burn_fsdp_checkpoint::ThreadRendezvous::new(2, std::time::Duration::from_secs(60));
    std::thread::scope(|scope| {
        for mut end in ends {
            let (checkpoints, request, mut source) = (&checkpoints, &request, &source);
            scope.spawn(move || {
                burn_fsdp_checkpoint::save(checkpoints, request, &mut source, &mut end)
                    .expect("saves")
            });
        }
    });
    let step = checkpoints.newest().expect("opens");
    let out = dir.path().join("model.safetensors");
    consolidate_to_file(&step, &out, &ConsolidationConfig::default(), |tensor| {
        Some(PlainTensor::unchanged(tensor))
    })
    .expect("writes");
    let bytes = std::fs::read(&out).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("reads");
    assert!(file.tensor("big").expect("there").data() == whole);

    let out = dir.path().join("turned.safetensors");
    let config = ConsolidationConfig {
        transpose_bytes: 5 << 20,
        ..ConsolidationConfig::default()
    };
    let turn = |tensor: &TensorEntry| {
        let name = tensor.name.clone();
        Some(PlainTensor {
            name,
            is_transposed: true,
        })
    };
    consolidate_to_file(&step, &out, &config, turn).expect("writes");
    let bytes = std::fs::read(&out).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("reads");
    let turned = file.tensor("big").expect("there").data();
    let want = (0..shape[1]).flat_map(|column| (0..shape[0]).map(move |row| (row, column)));
    for ((row, column), got) in want.zip(turned.chunks(4)) {
        let start = (row * shape[1] + column) * 4;
        assert_eq!(got, &whole[start..start + 4], "{row} {column}");
    }
}

#[test]
fn an_inspection_is_complete_and_round_trips_through_json() {
    let memory = Memory::new();
    let step = saved(&memory, Kind::Rows);
    let inspection = Inspection::new(&step);
    let printed = inspection.to_string();
    for text in [
        "step-000001",
        "shard=3",
        "embedding.weight",
        "optimizer state",
        "BF16",
        "[3, 5, 2]",
        "shard(0)",
        "\\n",
    ] {
        assert!(printed.contains(text), "{text:?} is not in {printed}");
    }
    let state = inspection.totals(TensorKind::OptimizerState);
    assert_eq!(
        (state.num_tensors, state.num_elements, state.bytes),
        (2, 210, 840)
    );
    let json = serde_json::to_value(&inspection).expect("JSON");
    assert_eq!(json["tensors"][0]["name"], "embedding.weight");
}
