//! Addresses that the driver passes: checked once, where they come in, and typed from there on.
//!
//! The driver is trusted as the system above is, so the check finds mistakes and not attacks. An address
//! must be aligned for its type, must not wrap around, and must not lie below the direct map, where user
//! space is.

use core::alloc::Layout;
use core::ops::{Deref, DerefMut};

use mercury_abi::code::Code;

use crate::native::direct_map;

/// The argument of a call: a `T` of the driver's, which the hypervisor alone uses until the call returns.
#[derive(Debug)]
pub struct Argument<T: 'static>(&'static mut T);

impl<T> Argument<T> {
    /// Checks the address that came with a call.
    ///
    /// # Errors
    /// [`Code::BadArgument`] if no `T` of the kernel can lie there.
    ///
    /// # Safety
    /// The driver passed the address with a call that takes a `T`. The `T` is made of integers, is mapped
    /// for the hypervisor while the argument lives, and is not used by any other CPU meanwhile.
    pub unsafe fn at(address: u64) -> Result<Self, Code> {
        let first = checked::<T>(address, 1)?;
        // SAFETY: aligned and not null, as `checked` says; the rest is the caller's promise.
        Ok(Self(unsafe { &mut *first }))
    }
}

impl<T> Deref for Argument<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

impl<T> DerefMut for Argument<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0
    }
}

/// Returns an array of the driver's; an empty one if the address or the number of entries is 0.
///
/// # Errors
/// [`Code::BadArgument`] if no such array of the kernel can lie there.
///
/// # Safety
/// The driver keeps so many entries at the address, and leaves them as they are while the hypervisor uses
/// the slice. Each is valid as a `T`. Pages that hold them are mapped whenever one is read.
pub unsafe fn array<T>(address: u64, count: u64) -> Result<&'static [T], Code> {
    if address == 0 || count == 0 {
        return Ok(&[]);
    }
    let first = checked::<T>(address, count)?;
    // SAFETY: aligned and not null, as `checked` says; the rest is the caller's promise.
    Ok(unsafe { core::slice::from_raw_parts(first, count as usize) })
}

/// Returns the pointer to `count` values of type `T`, if they can lie at this address of the kernel.
fn checked<T>(address: u64, count: u64) -> Result<*mut T, Code> {
    let address = check(address, count, Layout::new::<T>())?;
    Ok(core::ptr::with_exposed_provenance_mut(address))
}

/// Returns the address, if `count` values of this layout can lie there. Not inlined: the image is small.
#[inline(never)]
fn check(address: u64, count: u64, layout: Layout) -> Result<usize, Code> {
    let size = count.checked_mul(layout.size() as u64).filter(|size| *size <= isize::MAX as u64);
    let end = size.and_then(|size| address.checked_add(size));
    let is_of_kernel = address != 0 && address >= direct_map().as_u64();
    if end.is_none() || !is_of_kernel || !address.is_multiple_of(layout.align() as u64) {
        return Err(Code::BadArgument);
    }
    Ok(address as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_aligned_addresses_pass() {
        assert_eq!(checked::<u64>(0x1000, 1).map(|first| first.addr()), Ok(0x1000));
        for (address, count) in [(0, 1), (0x1004, 1), (u64::MAX - 7, 1), (0x1000, u64::MAX / 4)] {
            assert_eq!(checked::<u64>(address, count), Err(Code::BadArgument), "{address:#x}, {count}");
        }
    }

    #[test]
    fn an_array_without_entries_is_empty() {
        // SAFETY: no entry is read.
        let arrays = unsafe { [array::<u64>(0, 5), array::<u64>(0x1004, 0)] };
        assert_eq!(arrays, [Ok(&[][..]), Ok(&[][..])]);
    }
}
