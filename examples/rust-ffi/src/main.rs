//! Calls the launcher of `mhcgen emit --streams 4 --fuse pre --abi c` on mhcgen's CPU executor, and checks two
//! properties of the results that a wrong layout would break. On a GPU the pointers would be device pointers.

use std::ffi::CStr;
use std::process::exit;
use std::ptr::null_mut;

mod pre {
    include!(concat!(env!("MHC_DIR"), "/pre.rs"));
}
use pre::{HIDDEN, STREAMS};

const TOKENS: usize = 3;
const ROWS: usize = (2 + STREAMS) * STREAMS;

/// Memory whose alignment the launcher accepts: a Vec<f32> has only that of its elements.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Four([f32; 4]);

struct Array {
    blocks: Vec<Four>,
    len: usize,
}

impl Array {
    fn new(len: usize, value: impl Fn(usize) -> f32) -> Array {
        let block = |b: usize| Four(std::array::from_fn(|i| value(4 * b + i)));
        Array { blocks: (0..len.div_ceil(4)).map(block).collect(), len }
    }
    fn as_ptr(&self) -> *const f32 {
        self.blocks.as_ptr().cast()
    }
    fn as_mut_ptr(&mut self) -> *mut f32 {
        self.blocks.as_mut_ptr().cast()
    }
    fn values(&self) -> &[f32] {
        // SAFETY: the blocks are `len` floats or more without gaps.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }
}

fn check(what: &str, status: i32) {
    if status != pre::MHC_OK {
        // SAFETY: the library returns a constant string for every number.
        let text = unsafe { CStr::from_ptr(pre::mhc_status_string(status)) };
        eprintln!("{what}: status {status}, {}", text.to_string_lossy());
        exit(1);
    }
}

fn main() {
    let wave = |step: f32| move |i: usize| (i as f32 * step).sin();
    let x = Array::new(TOKENS * STREAMS * HIDDEN, wave(0.37));
    let mixes = Array::new(TOKENS * ROWS, wave(0.71));
    let scale = Array::new(3, |_| 1.0);
    let base = Array::new(ROWS, wave(1.3));
    let mut pre_gates = Array::new(TOKENS * STREAMS, |_| f32::NAN);
    let mut post = Array::new(TOKENS * STREAMS, |_| f32::NAN);
    let mut comb = Array::new(TOKENS * STREAMS * STREAMS, |_| f32::NAN);
    let mut y = Array::new(TOKENS * HIDDEN, |_| f32::NAN);
    let mut args = pre::Args {
        x: x.as_ptr(),
        mixes: mixes.as_ptr(),
        scale: scale.as_ptr(),
        base: base.as_ptr(),
        pre: pre_gates.as_mut_ptr(),
        post: post.as_mut_ptr(),
        comb: comb.as_mut_ptr(),
        y: y.as_mut_ptr(),
        tokens: TOKENS as i64,
    };
    let mut bytes = 0;
    // SAFETY: pointers and sizes are those of the arrays above, which outlive the calls.
    unsafe {
        check("workspace", pre::mhc_pre_workspace_bytes(args.tokens, &mut bytes));
        assert_eq!(bytes, 0, "one kernel needs no workspace");
        check("launch", pre::mhc_pre_launch(&args, null_mut(), 0, null_mut()));
        args.tokens = -1;
        assert_eq!(pre::mhc_pre_launch(&args, null_mut(), 0, null_mut()), pre::MHC_NEGATIVE_TOKENS);
    }

    // The Sinkhorn ends with its columns, which therefore sum to 1 but for eps and rounding.
    let mut worst: f64 = 0.0;
    for matrix in comb.values().chunks(STREAMS * STREAMS) {
        for to in 0..STREAMS {
            let total: f64 = (0..STREAMS).map(|from| f64::from(matrix[from * STREAMS + to])).sum();
            worst = worst.max((total - 1.0).abs());
        }
    }
    println!("columns of comb sum to 1 within {worst:.1e}");
    assert!(worst < 1e-5);

    // y is the streams weighed by the pre gates.
    worst = 0.0;
    for t in 0..TOKENS {
        for h in 0..HIDDEN {
            let stream = |c: usize| f64::from(x.values()[(t * STREAMS + c) * HIDDEN + h]);
            let gate = |c: usize| f64::from(pre_gates.values()[t * STREAMS + c]);
            let want: f64 = (0..STREAMS).map(|c| gate(c) * stream(c)).sum();
            worst = worst.max((f64::from(y.values()[t * HIDDEN + h]) - want).abs());
        }
    }
    println!("y is the weighed sum of the streams within {worst:.1e}");
    assert!(worst < 1e-5);
}
