//! The memory that tests share.

use std::sync::{Mutex, PoisonError};

use crate::memory::Memory;

/// Tests share the one address of the direct map.
static MEMORY: Mutex<Option<Memory>> = Mutex::new(None);
const SIZE: u64 = 1 << 20;

pub fn with_memory<T>(test: impl FnOnce(&Memory) -> T) -> T {
    let mut shared = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = shared.get_or_insert_with(|| Memory::new(SIZE).unwrap());
    test(memory)
}

/// Gives a test the memory itself, which the test gives back.
pub fn with_own_memory<T>(test: impl FnOnce(Memory) -> (Memory, T)) -> T {
    let mut shared = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = shared.take().unwrap_or_else(|| Memory::new(SIZE).unwrap());
    let (memory, result) = test(memory);
    *shared = Some(memory);
    result
}
