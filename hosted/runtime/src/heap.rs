//! The C library's heaps. A machine's processes begin as copies of one, and each writes to pages of its heap.
//! What the heap holds, and where, decides how many pages that are.

use std::{
    hint, panic,
    thread::{self, JoinHandle},
};

use crate::layout::PAGE;

/// The size of a block at whose end the C library gives back what is free behind it, in bytes: the limit is
/// 64 KiB. From 128 KiB on a block is no part of a heap.
const LARGE: usize = 96 << 10;
/// The C library's own limits, in bytes.
const LIMITS: [(libc::c_int, libc::c_int); 2] =
    [(libc::M_TRIM_THRESHOLD, 128 << 10), (libc::M_TOP_PAD, 128 << 10)];

/// Does work that leaves many small holes in a heap. The heap is a thread's own, and is given back except for
/// the result.
pub fn apart<T: Send + 'static>(work: fn() -> T) -> T {
    limit([(libc::M_TRIM_THRESHOLD, PAGE as libc::c_int), (libc::M_TOP_PAD, 0)]);
    let thread = thread::Builder::new().spawn(move || {
        let result = work();
        drop(hint::black_box(Vec::<u8>::with_capacity(LARGE)));
        result
    });
    let result = thread.map_or_else(|_| Ok(work()), JoinHandle::join);
    limit(LIMITS);
    result.unwrap_or_else(|panic| panic::resume_unwind(panic))
}

/// Makes all threads from here on use one heap. A thread with a heap of its own would take more memory. And
/// before it makes one, the C library opens a file to count the host's processors, for which the host would
/// end the machine.
pub(crate) fn share() {
    limit([(libc::M_ARENA_MAX, 1)]);
}

/// Returns freed memory to the host.
pub(crate) fn give_back() {
    // SAFETY: It takes a number.
    unsafe { libc::malloc_trim(0) };
}

fn limit<const N: usize>(limits: [(libc::c_int, libc::c_int); N]) {
    for (kind, value) in limits {
        // SAFETY: It takes numbers.
        unsafe { libc::mallopt(kind, value) };
    }
}
