//! Tests of the number and size of file requests for the shards of ranks.

use burn_fsdp_models::{LlamaConfig, LlamaVariant, ParameterSpec, WeightsFile};
use serde_json::json;
use tempfile::TempDir;

use crate::safetensors::Container;

/// Rows of 512 to 1536 bytes in 16 bits.
const SMALL: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 256,
    heads: 4,
    kv_heads: 2,
    hidden: 768,
    vocab: 515,
    seq: 32,
    rope_base: 10_000,
    variant: LlamaVariant::PLAIN,
};

/// Matrices larger than a request: 5,000 rows of 1 KiB in 32 bits, and rows of 320,000 bytes.
const LARGE: LlamaConfig = LlamaConfig {
    layers: 1,
    dim: 256,
    heads: 4,
    kv_heads: 1,
    hidden: 80_000,
    vocab: 5_000,
    seq: 32,
    rope_base: 10_000,
    variant: LlamaVariant::PLAIN,
};

const MIB: usize = 1 << 20;

/// Writes weights of zeros, with this many bytes per element.
fn zeros(config: LlamaConfig, dtype: &str, size: usize) -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    let mut container = Container::empty();
    let mut end = 0;
    for spec in config.parameters() {
        let start = end;
        end += size * spec.shape.iter().product::<usize>();
        let entry = json!({"dtype": dtype, "shape": spec.shape, "data_offsets": [start, end]});
        container.header.insert(spec.name, entry);
    }
    let path = folder.path().join("model.safetensors");
    container.write(&path);
    let file = std::fs::OpenOptions::new().append(true).open(&path);
    let file = file.expect("our own");
    // The file takes no space on disk.
    let len = file.metadata().expect("our own").len();
    file.set_len(len + end as u64).expect("a sparse file");
    folder
}

/// Reads the shards of all ranks, and returns the numbers of requests and bytes.
fn shards(weights: &WeightsFile<LlamaConfig>, spec: &ParameterSpec, ranks: usize) -> (u64, u64) {
    let before = (weights.num_requests(), weights.num_bytes_requested());
    let len: usize = spec.shape.iter().product();
    for rank in 0..ranks {
        let range = len * rank / ranks..len * (rank + 1) / ranks;
        let values = weights.read(&spec.path, range.clone()).expect("readable");
        assert_eq!(values.len(), range.len());
    }
    (
        weights.num_requests() - before.0,
        weights.num_bytes_requested() - before.1,
    )
}

#[test]
fn rows_of_a_small_matrix_are_read_at_once() {
    let folder = zeros(SMALL, "BF16", 2);
    for ranks in [1, 2, 3, 8] {
        let weights = WeightsFile::open(folder.path(), SMALL).expect("it fits");
        for spec in SMALL.parameters() {
            let (requests, bytes) = shards(&weights, &spec, ranks);
            assert_eq!(requests, ranks as u64, "{} on {ranks} ranks", spec.name);
            let whole = 2 * spec.shape.iter().product::<usize>() as u64;
            let most = if spec.is_transposed {
                ranks as u64 * whole
            } else {
                whole
            };
            assert!((whole..=most).contains(&bytes), "{}: {bytes}", spec.name);
        }
        let tensors = SMALL.parameters().len();
        assert_eq!(weights.num_requests(), (tensors * ranks) as u64);
    }
}

#[test]
fn requests_are_bounded_and_distant_pieces_are_read_separately() {
    let folder = zeros(LARGE, "F32", 4);
    let weights = WeightsFile::open(folder.path(), LARGE).expect("it fits");
    let table = LARGE.parameters();
    let named = |name: &str| {
        let spec = table.iter().find(|spec| spec.name.contains(name));
        spec.expect("a parameter").clone()
    };
    for ranks in [1, 2, 4] {
        // A request has 1024 rows of 1 KiB.
        let head = named("lm_head");
        let (requests, bytes) = shards(&weights, &head, ranks);
        assert_eq!(requests, ranks as u64 * 5_000_u64.div_ceil(1024));
        assert!(bytes <= (ranks * 4 * 5_000 * 256) as u64);
        // Elements that are in order are divided into requests of the same size.
        let (requests, bytes) = shards(&weights, &named("embed_tokens"), ranks);
        let share = 4 * 5_000 * 256 / ranks;
        assert_eq!(requests, (ranks * share.div_ceil(MIB)) as u64);
        assert_eq!(bytes, 4 * 5_000 * 256);
    }
    // With four ranks, each has pieces of 80,000 bytes with 240,000 between them: a request has three rows.
    let down = named("down_proj");
    let (requests, _) = shards(&weights, &down, 4);
    assert_eq!(requests, 4 * 256_u64.div_ceil(3));
    // With eight ranks, each has 40,000 bytes of each row, and leaves out 280,000.
    let (requests, bytes) = shards(&weights, &down, 8);
    assert_eq!(requests, 8 * 256);
    assert_eq!(bytes, 4 * 256 * 80_000);
}
