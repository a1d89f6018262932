//! Products by cuBLASLt, loaded at run time.
//!
//! Burn's matrices are row-major with a step between rows; cuBLASLt's are column-major. So `D = A B` is asked for as
//! `Dᵀ = Bᵀ Aᵀ`, where each buffer is taken as it lies.
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::{result, sys};

use crate::route::{RouteError, because};

/// How numbers are stored and multiplied. Sums are in 32 bits in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// bf16 in and out.
    Bf16,
    /// f32 in and out, multiplied as TF32.
    Tf32,
    /// f32 throughout.
    F32,
}

/// What is done to the product before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// A bias for each column is added.
    Bias,
    /// A bias is added, then GELU.
    BiasGelu,
}

/// A product `[m, k] x [k, n]`. A matrix that is `turned` lies with its last two dimensions exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows, inner size, columns.
    pub mkn: (u64, u64, u64),
    /// Whether the left and the right matrix are turned.
    pub turned: (bool, bool),
    /// Elements from row to row: left, right, result.
    pub steps: (i64, i64, i64),
    /// How many products, and elements from matrix to matrix: left, right, result.
    pub batch: Option<(i32, (i64, i64, i64))>,
    /// How numbers are stored and multiplied.
    pub kind: Kind,
    /// What is done to the product.
    pub epilogue: Epilogue,
}

/// cuBLASLt's handle and the products planned so far.
pub struct Lt {
    handle: sys::cublasLtHandle_t,
    plans: Mutex<HashMap<Shape, Arc<Plan>>>,
}

// SAFETY: a handle of cuBLASLt may be used by several threads at once (its documentation says so).
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

/// A product with its algorithm chosen.
pub struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    left: sys::cublasLtMatrixLayout_t,
    right: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Bytes of workspace that it wants.
    pub workspace: usize,
}

// SAFETY: descriptions are plain host memory. Only the server's thread changes one (the bias pointer).
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

/// Bytes of workspace offered to the heuristics, as PyTorch offers on Hopper.
pub const WORKSPACE: usize = 32 << 20;

impl Lt {
    /// Loads the library and makes a handle on the current context.
    pub fn new() -> Result<Self, RouteError> {
        // SAFETY: looks for the library by its names and loads it.
        if !unsafe { sys::is_culib_present() } {
            return Err(because("cuBLASLt", "no libcublasLt.so on LD_LIBRARY_PATH"));
        }
        let handle = result::create_handle().map_err(|e| because("cublasLtCreate", e))?;
        Ok(Self {
            handle,
            plans: Mutex::default(),
        })
    }

    /// The library's version.
    pub fn version(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// The plan of a product; made at the first call.
    pub fn plan(&self, shape: Shape) -> Result<Arc<Plan>, RouteError> {
        let mut plans = self.plans.lock().expect("not poisoned");
        if let Some(plan) = plans.get(&shape) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(self.make(&shape)?);
        plans.insert(shape, plan.clone());
        Ok(plan)
    }

    fn make(&self, shape: &Shape) -> Result<Plan, RouteError> {
        let (m, k, n) = shape.mkn;
        let data = if shape.kind == Kind::Bf16 {
            sys::cudaDataType_t::CUDA_R_16BF
        } else {
            sys::cudaDataType_t::CUDA_R_32F
        };
        let compute = match shape.kind {
            Kind::Tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            Kind::Bf16 | Kind::F32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let layout =
            |turned: bool, rows: u64, columns: u64, step: i64, between: Option<(i32, i64)>| {
                // Row-major [rows, columns] is column-major [columns, rows]; turned, it lies as [columns, rows].
                let (a, b) = if turned {
                    (rows, columns)
                } else {
                    (columns, rows)
                };
                let layout = result::create_matrix_layout(data, a, b, step)
                    .map_err(|e| because("a layout", e))?;
                if let Some((count, elements)) = between {
                    use sys::cublasLtMatrixLayoutAttribute_t as A;
                    // SAFETY: the layout was just made, and the values have the types that these attributes want.
                    unsafe {
                        set_layout(layout, A::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
                        set_layout(
                            layout,
                            A::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                            &elements,
                        )?;
                    }
                }
                Ok::<_, RouteError>(layout)
            };
        let between = |pick: fn((i64, i64, i64)) -> i64| {
            shape.batch.map(|(count, steps)| (count, pick(steps)))
        };
        let left = layout(shape.turned.1, k, n, shape.steps.1, between(|s| s.1))?;
        let right = layout(shape.turned.0, m, k, shape.steps.0, between(|s| s.0))?;
        let out = layout(false, m, n, shape.steps.2, between(|s| s.2))?;
        let desc = result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)
            .map_err(|e| because("a description", e))?;
        // CUBLAS_OP_T and CUBLAS_OP_N.
        let turn = |turned: bool| i32::from(turned);
        use sys::cublasLtMatmulDescAttributes_t as D;
        let epilogue = match shape.epilogue {
            Epilogue::None => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::BiasGelu => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
        };
        let preference = result::create_matmul_pref().map_err(|e| because("a preference", e))?;
        // SAFETY: all were made above, and the values have the types that these attributes want.
        let found = unsafe {
            set(desc, D::CUBLASLT_MATMUL_DESC_TRANSA, &turn(shape.turned.1))?;
            set(desc, D::CUBLASLT_MATMUL_DESC_TRANSB, &turn(shape.turned.0))?;
            set(desc, D::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            let most =
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(
                preference,
                most,
                (&raw const WORKSPACE_ASKED).cast(),
                size_of::<usize>(),
            )
            .map_err(|e| because("a preference", e))?;
            let found = result::get_matmul_algo_heuristic(
                self.handle,
                desc,
                left,
                right,
                out,
                out,
                preference,
            );
            let _ = result::destroy_matmul_pref(preference);
            found.map_err(|e| because(&format!("no algorithm for {shape:?}"), e))?
        };
        Ok(Plan {
            desc,
            left,
            right,
            out,
            algorithm: found.algo,
            workspace: found.workspaceSize,
        })
    }

    /// Hands the product to `stream`.
    ///
    /// # Safety
    /// The pointers must be valid on `stream` for the plan's sizes, and the workspace for [`WORKSPACE`] bytes. Called on
    /// one thread at a time for a plan with a bias.
    pub unsafe fn enqueue(
        &self,
        plan: &Plan,
        at: &Pointers,
        stream: *mut c_void,
    ) -> Result<(), RouteError> {
        let (one, zero) = (1f32, 0f32);
        // SAFETY: the plan's parts live as long as it, and the rest is the caller's.
        unsafe {
            if let Some(bias) = at.bias {
                set(
                    plan.desc,
                    sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                    &bias,
                )?;
            }
            result::matmul(
                self.handle,
                plan.desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                at.right as *const c_void,
                plan.left,
                at.left as *const c_void,
                plan.right,
                at.out as *const c_void,
                plan.out,
                at.out as *mut c_void,
                plan.out,
                &plan.algorithm,
                at.workspace as *mut c_void,
                plan.workspace,
                stream.cast(),
            )
        }
        .map_err(|e| because("cublasLtMatmul", e))
    }
}

static WORKSPACE_ASKED: usize = WORKSPACE;

/// Device pointers of one product.
pub struct Pointers {
    /// The left matrix.
    pub left: u64,
    /// The right matrix.
    pub right: u64,
    /// The result.
    pub out: u64,
    /// Scratch memory.
    pub workspace: u64,
    /// The bias, if the epilogue has one.
    pub bias: Option<u64>,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.desc);
            for layout in [self.left, self.right, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

unsafe fn set<T>(
    desc: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), RouteError> {
    // SAFETY: the caller's.
    unsafe {
        result::set_matmul_desc_attribute(
            desc,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
    .map_err(|e| because("an attribute of a product", e))
}

unsafe fn set_layout<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: sys::cublasLtMatrixLayoutAttribute_t,
    value: &T,
) -> Result<(), RouteError> {
    // SAFETY: the caller's.
    unsafe {
        result::set_matrix_layout_attribute(
            layout,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
    .map_err(|e| because("an attribute of a layout", e))
}
