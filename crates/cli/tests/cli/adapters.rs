//! Adapters of chosen matrices, with ranks and scales of their own, from and to folders of peft.

use burn::module::{Lora, LoraAdapter, Module, Param, ParamGroup, Reparameterizer};
use burn::tensor::{Device, Tensor};
use burn_fsdp_models::{Architecture, ParameterSpec};
use serde_json::{Value, json};

use crate::command::{Folder, losses};
use crate::hugging_face::{
    Factors, GPT2, LLAMA, assert_close, folders, loaded, ok, peer, peer_loss, plainly, report,
    train,
};
use crate::skipped::python;

/// A step that changes nothing and reports the loss of the first batch.
const STILL: &str = "--lr 0 --weight-decay 0 --steps 1 --synthetic";

/// A case: a model, flags, and the rank and scale of each adapted module by the end of its name.
type Case = (
    &'static str,
    &'static str,
    &'static [(&'static str, usize, f64)],
);

const CASES: [Case; 4] = [
    (
        "llama",
        "--lora 2 --lora-alpha 3 --lora-targets q_proj,v_proj",
        &[("q_proj", 2, 1.5), ("v_proj", 2, 1.5)],
    ),
    // The default alpha is twice the rank, so the scale is 2.
    (
        "llama",
        "--lora 2 --lora-targets q_proj,mlp.down_proj,layers.1.self_attn.o_proj --lora-rank-pattern down_proj=5 \
         --lora-alpha-pattern layers.0.self_attn.q_proj=7",
        &[
            ("layers.0.self_attn.q_proj", 2, 3.5),
            ("layers.1.self_attn.q_proj", 2, 2.0),
            ("down_proj", 5, 2.0),
            ("layers.1.self_attn.o_proj", 2, 2.0),
        ],
    ),
    (
        "llama",
        "--lora 4 --lora-alpha 6 --rslora --lora-targets layers.0.**,k_proj --lora-rank-pattern *_proj=4,up_proj=9",
        &[
            ("layers.1.self_attn.k_proj", 4, 3.0),
            ("layers.0.mlp.up_proj", 9, 2.0),
            ("layers.0.self_attn.q_proj", 4, 3.0),
            ("layers.0.self_attn.k_proj", 4, 3.0),
            ("layers.0.self_attn.v_proj", 4, 3.0),
            ("layers.0.self_attn.o_proj", 4, 3.0),
            ("layers.0.mlp.gate_proj", 4, 3.0),
            ("layers.0.mlp.down_proj", 4, 3.0),
        ],
    ),
    (
        "gpt2",
        "--lora 3 --lora-alpha 4.5 --lora-targets attn.c_proj,c_fc --lora-alpha-pattern h.1.mlp.c_fc=6",
        &[
            ("attn.c_proj", 3, 1.5),
            ("h.0.mlp.c_fc", 3, 1.5),
            ("h.1.mlp.c_fc", 3, 2.0),
        ],
    ),
];

/// Burn's adapters in several groups of parameters.
struct Groups(Vec<Lora>);

impl Reparameterizer for Groups {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let mut groups = self.0.iter_mut();
        match groups.find(|lora| lora.param_group.matches(&param.id, Some(path))) {
            Some(lora) => lora.reparameterize(path, param),
            None => (param.set_require_grad(false), None),
        }
    }
}

fn is_module(spec: &ParameterSpec, end: &str) -> bool {
    spec.name.ends_with(&format!(".{end}.weight"))
}

/// Returns the losses of plain Burn, whose adapters start with the values in `factors.safetensors`.
fn of_burn<A: Architecture>(folder: &Folder, sizes: A, (name, _, expected): Case) -> Vec<f64> {
    let device = Device::flex().autodiff();
    let groups = expected.iter().map(|(end, rank, scale)| {
        let matrices = sizes.parameters().into_iter();
        let adapted = matrices.filter(|spec| is_module(spec, end));
        let paths: Vec<_> = adapted.map(|spec| spec.path).collect();
        assert!(!paths.is_empty(), "{end}");
        Lora::new(*rank, scale * *rank as f64).set_param_group(ParamGroup::from_paths(paths))
    });
    let groups = Groups(groups.collect());
    let path = Vec::new();
    let model = loaded(folder, name, sizes)
        .apply_reparameterization(groups)
        .map(&mut Factors { folder, path });
    plainly(model, 4, 300, &device)
}

#[test]
fn chosen_matrices_train_like_burns() {
    let folder = folders();
    for case @ (name, flags, expected) in CASES {
        let run = format!("--init {name} {flags}");
        // With a learning rate of zero, the step contains the initial factors.
        let begun = format!("{run} {STILL} --checkpoint-dir begun --overwrite");
        let begun = report(&folder, &begun);
        ok(&folder, "consolidate begun factors.safetensors --overwrite");
        let table = match name {
            "llama" => LLAMA.parameters(),
            _ => GPT2.parameters(),
        };
        let of = |(end, rank, _): &(&str, usize, f64)| -> usize {
            let adapted = table.iter().filter(|spec| is_module(spec, end));
            adapted
                .map(|spec| rank * (spec.shape[0] + spec.shape[1]))
                .sum()
        };
        let number: usize = expected.iter().map(of).sum();
        assert_eq!(begun["trained_params"], number, "{flags}");
        // The first values of `b` are zero, so other values test the scales of later steps.
        let want = match name {
            "llama" => of_burn(&folder, LLAMA, case),
            _ => of_burn(&folder, GPT2, case),
        };
        for extra in [
            "--ranks 1",
            "--ranks 2",
            "--ranks 4",
            "--ranks 1 --compile",
            "--ranks 2 --compile",
            "--ranks 4 --compile --certify",
        ] {
            let got = losses(&report(
                &folder,
                &format!("{run} --synthetic --steps 4 {extra}"),
            ));
            assert_close(&want, &got, &format!("{name} {flags} {extra}"));
        }
    }
}

fn config_of(folder: &Folder, name: &str) -> Value {
    let config = folder.read(&format!("{name}/adapter_config.json"));
    serde_json::from_str(&config).expect("JSON")
}

/// Trains adapters into `steps`, and writes them to `peft` and `merged`.
fn written(folder: &Folder, (name, flags, _): Case) {
    for made in ["steps", "peft", "merged"] {
        std::fs::remove_dir_all(folder.path(made)).ok();
    }
    let run = format!("--init {name} {flags} --synthetic --steps 4 --checkpoint-dir steps");
    report(folder, &run);
    let write = format!("consolidate steps --format hugging-face --init {name}");
    ok(folder, &format!("{write} peft"));
    ok(folder, &format!("{write} merged --merge"));
}

#[test]
fn folders_of_peft_select_exactly_the_adapted_modules() {
    let folder = folders();
    let wanted = [
        json!({
            "r": 2, "lora_alpha": 3.0, "use_rslora": false, "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {}, "alpha_pattern": {},
        }),
        json!({
            "r": 2, "lora_alpha": 4.0, "use_rslora": false,
            "target_modules": ["1.self_attn.o_proj", "down_proj", "q_proj"],
            "rank_pattern": {"down_proj": 5},
            "alpha_pattern": {"0\\.self_attn\\.q_proj": 7.0, "down_proj": 10.0},
        }),
        json!({
            "r": 4, "lora_alpha": 6.0, "use_rslora": true,
            "target_modules": [
                "0.mlp.down_proj", "0.mlp.gate_proj", "0.mlp.up_proj", "0.self_attn.o_proj", "0.self_attn.q_proj",
                "0.self_attn.v_proj", "k_proj",
            ],
            "rank_pattern": {"up_proj": 9}, "alpha_pattern": {},
        }),
        json!({
            "r": 3, "lora_alpha": 4.5, "use_rslora": false, "target_modules": ["attn.c_proj", "c_fc"],
            "rank_pattern": {}, "alpha_pattern": {"1\\.mlp\\.c_fc": 6.0},
        }),
    ];
    let python = python("torch, transformers, peft");
    for (case @ (name, flags, _), wanted) in CASES.into_iter().zip(wanted) {
        written(&folder, case);
        let config = config_of(&folder, "peft");
        for (key, value) in wanted.as_object().expect("keys") {
            assert_eq!(config[key], *value, "{flags}: {key}");
        }
        let merged = losses(&report(&folder, &format!("--init merged {STILL}")));
        let base = losses(&report(&folder, &format!("--init {name} {STILL}")));
        assert!((merged[0] - base[0]).abs() > 1e-3, "adapters do something");
        // The folder is read back by both engines, on any number of ranks.
        for extra in ["--ranks 1", "--ranks 2", "--ranks 4", "--ranks 2 --compile"] {
            let run = format!("--init {name} --adapter peft {STILL} {extra}");
            let again = losses(&report(&folder, &run));
            assert_close(&merged, &again, &format!("{flags} {extra}"));
        }
        if let Some(python) = &python {
            let theirs = peer_loss(python, &folder, &format!("{name} peft"));
            assert_close(&theirs, &merged, &format!("{flags} in peft"));
        }
    }
}

/// The factors of the folder are trained on, and the run is resumed with the same flags.
#[test]
fn training_continues_from_a_folder_of_peft() {
    let folder = folders();
    let case = CASES[1];
    written(&folder, case);
    ok(&folder, "consolidate steps factors.safetensors");
    let want = of_burn(&folder, LLAMA, case);
    let run = "--init llama --adapter peft --synthetic";
    for (index, extra) in [
        "--ranks 1",
        "--ranks 2",
        "--ranks 4",
        "--ranks 1 --compile",
        "--ranks 4 --compile --certify",
    ]
    .into_iter()
    .enumerate()
    {
        let again = format!("--checkpoint-dir again-{index} {extra}");
        let mut got = losses(&report(&folder, &format!("{run} --steps 2 {again}")));
        let rest = report(&folder, &format!("{run} --steps 4 {again} --resume"));
        got.extend(losses(&rest));
        assert_close(&want, &got, extra);
    }
    // What is written again has the same modules, ranks and alphas.
    ok(&folder, "consolidate again-1 second --format hugging-face");
    assert_eq!(config_of(&folder, "second"), config_of(&folder, "peft"));
    ok(&folder, "consolidate peft both --init llama --merge");
    let merged = |name: &str| folder.weights(&format!("{name}/model.safetensors"));
    assert_eq!(merged("both"), merged("merged"));
    let replaced = train(
        &folder,
        &format!("{run} --steps 1 --metrics peft/adapter_config.json"),
    );
    assert_eq!(replaced.code, 2, "{}", replaced.stderr);
    let problem = "is a file of the --adapter folder";
    assert!(replaced.stderr.contains(problem), "{}", replaced.stderr);
    for (flags, problem) in [
        (
            "--lora 2 --lora-targets q_proj",
            "with an adapter of rank 2 and alpha 7 on `layers.0.wq.weight`, but this run trains an adapter of \
             rank 2 and alpha 4 on it",
        ),
        ("--lora 2", "on `layers.0.wq"),
        (
            "--lora 2 --rslora",
            "adapters of --lora 2 --lora-alpha 4, but this run trains adapters of --lora 2 --lora-alpha 4 --rslora",
        ),
    ] {
        let run = format!("--init llama {flags} --synthetic --steps 5");
        let run = train(&folder, &format!("{run} --checkpoint-dir steps --resume"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        assert!(run.stderr.contains(problem), "{flags}: {}", run.stderr);
    }
}

#[test]
fn folders_that_peft_has_written_are_read() {
    let Some(python) = python("torch, transformers, peft") else {
        return;
    };
    let folder = folders();
    for (index, (name, settings)) in [
        ("llama", json!({"r": 3, "target_modules": ["q_proj", "up_proj"]})),
        (
            "llama",
            json!({
                "r": 4, "lora_alpha": 2, "use_rslora": true, "target_modules": "all-linear",
                "rank_pattern": {"down_proj": 2, "layers.1.mlp.up_proj": 5}, "alpha_pattern": {"q_proj": 9},
            }),
        ),
        (
            "llama",
            json!({"target_modules": ".*\\.1\\.self_attn\\.[qv]_proj", "init_lora_weights": "gaussian"}),
        ),
        (
            "gpt2",
            json!({"r": 2, "target_modules": ["c_proj", "attn.c_attn"], "fan_in_fan_out": true}),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("peft-{index}");
        peer(&python, &folder, &format!("adapt {name} {out} {settings}"));
        let theirs = peer_loss(&python, &folder, &format!("{name} {out}"));
        let base = peer_loss(&python, &folder, name);
        assert!((base[0] - theirs[0]).abs() > 1e-3, "adapters do something");
        for extra in ["--ranks 2", "--ranks 1 --compile"] {
            let run = format!("--init {name} --adapter {out} {STILL} {extra}");
            let ours = losses(&report(&folder, &run));
            assert_close(&theirs, &ours, &format!("{settings} {extra}"));
        }
        let merged = format!("merged-{index}");
        ok(
            &folder,
            &format!("consolidate {out} {merged} --init {name} --merge"),
        );
        let ours = losses(&report(&folder, &format!("--init {merged} {STILL}")));
        assert_close(&theirs, &ours, &format!("{settings}, merged"));
    }
}

#[test]
fn unsupported_folders_of_peft_are_named() {
    let folder = folders();
    written(&folder, CASES[1]);
    let config = config_of(&folder, "peft");
    let read = |key: &str, value: Value| {
        let mut changed = config.clone();
        changed[key] = value;
        folder.write("peft/adapter_config.json", changed.to_string());
        train(&folder, &format!("--init llama --adapter peft {STILL}"))
    };
    for (key, value) in [
        ("lora_dropout", json!(0.05)),
        ("use_dora", json!("yes")),
        ("bias", json!("lora_only")),
        ("modules_to_save", json!(["lm_head"])),
        ("layers_to_transform", json!([1])),
        ("exclude_modules", json!(["v_proj"])),
        ("trainable_token_indices", json!([3])),
        ("a_later_setting", json!({"of": "peft"})),
        ("peft_type", json!("IA3")),
        ("task_type", json!("SEQ_CLS")),
        ("init_lora_weights", json!("pissa")),
        ("rank_pattern", json!({".*_proj": 2})),
        (
            "rank_pattern",
            json!({"q_proj": 2, "0.self_attn.q_proj": 5}),
        ),
        ("r", json!(-1)),
    ] {
        let run = read(key, value.clone());
        assert_eq!(run.code, 2, "{key}: {}", run.stderr);
        let named = format!("`{key}` is {value}, but");
        assert!(run.stderr.contains(&named), "{key}: {}", run.stderr);
    }
    for (key, value, problem) in [
        ("r", json!(3), "has shape [24, 2], but rank 3"),
        ("target_modules", json!(["q_proj"]), "does not select"),
        (
            "target_modules",
            json!(["q_proj", "down_proj", "o_proj"]),
            "selects model.layers.0.self_attn.o_proj, but",
        ),
        ("lora_alpha", json!(-1.0), "alphas above 0"),
    ] {
        let run = read(key, value);
        assert_eq!(run.code, 2, "{key}: {}", run.stderr);
        assert!(run.stderr.contains(problem), "{key}: {}", run.stderr);
    }
    // Without effect on merged weights.
    assert_eq!(read("lora_dropout", json!(0.1)).code, 2);
    ok(&folder, "consolidate peft again --init llama --merge");
    // Another model, and an adapter of other matrices.
    let other = train(&folder, &format!("--init gpt2 --adapter peft {STILL}"));
    assert_eq!(other.code, 2, "{}", other.stderr);
    folder.write("peft/adapter_config.json", config.to_string());
    let other = train(&folder, &format!("--init gpt2 --adapter peft {STILL}"));
    assert_eq!(other.code, 2, "{}", other.stderr);
    let problem = "is no factor of a matrix in the model's blocks";
    assert!(other.stderr.contains(problem), "{}", other.stderr);
    std::fs::rename(
        folder.path("peft/adapter_model.safetensors"),
        folder.path("peft/adapter_model.bin"),
    )
    .expect("a file");
    let other = train(&folder, &format!("--init llama --adapter peft {STILL}"));
    assert_eq!(other.code, 2, "{}", other.stderr);
    assert!(
        other.stderr.contains("PyTorch's format"),
        "{}",
        other.stderr
    );
}

#[test]
fn targets_that_match_nothing_are_named_with_the_nearest() {
    let folder = folders();
    for (flags, problem) in [
        (
            "--lora 2 --lora-targets q_proj,k_prj",
            "--lora-targets: `k_prj` matches no matrix of the blocks; the nearest are k_proj, ",
        ),
        (
            "--lora 2 --lora-targets lm_head",
            "`lm_head` matches no matrix of the blocks",
        ),
        (
            "--lora 2 --lora-targets q_proj --lora-rank-pattern k_proj=3",
            "--lora-rank-pattern: `k_proj` matches no matrix of the blocks; the nearest are q_proj, ",
        ),
        (
            "--lora 2 --lora-alpha-pattern selfattn.q_proj=3",
            "the nearest are self_attn.q_proj, ",
        ),
        (
            "--lora 2 --lora-rank-pattern q_proj=0",
            "--lora-rank-pattern: q_proj=0; the number must be from 1 to the hidden size",
        ),
        (
            "--lora 2 --lora-rank-pattern q_proj=25",
            "q_proj=25; the number must be from 1 to the hidden size",
        ),
        (
            "--lora 2 --lora-alpha-pattern q_proj=-3",
            "q_proj=-3; the number must be above 0",
        ),
        ("--lora 2 --lora-rank-pattern q_proj", "such as down_proj=4"),
        ("--lora-targets q_proj", "--lora <RANK>"),
        ("--rslora", "--lora <RANK>"),
        ("--lora 2 --adapter llama", "--adapter"),
        ("--adapter missing", "missing/adapter_config.json"),
        (
            "--adapter llama --optimizer muon",
            "llama/adapter_config.json",
        ),
    ] {
        let run = train(&folder, &format!("--init llama {flags} {STILL}"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        assert!(run.stderr.contains(problem), "{flags}: {}", run.stderr);
    }
}
