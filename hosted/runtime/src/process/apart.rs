//! Work in a process of its own, of which only the result stays.
//!
//! Loading a kernel takes many times the memory that a machine needs afterwards: the file, its
//! symbols, the decoder's tables. What a process has freed it has not always given back, and each
//! copy of the process has it, too. So the work is done in a child that ends. The result comes by
//! memory that both share until then ([`Parcel`]).

use std::{any::TypeId, ffi::c_void, panic, process::abort, ptr};

use super::{Fork, begin, fork, map_common};
use crate::error::{Error, Result};

/// The room for a result, in bytes. The host gives memory for what is used of it.
const ROOM: usize = 64 << 20;
const ALIGNMENT: usize = 16;
/// The exit status of a child that has left its error.
const FAILED: i32 = 1;

/// A value without pointers, which means the same in another process.
///
/// # Safety
/// The type has no pointers and no references.
pub unsafe trait Plain: Copy + 'static {}

// SAFETY: Numbers are no pointers.
unsafe impl Plain for u8 {}
// SAFETY: As above.
unsafe impl Plain for u64 {}
// SAFETY: As above.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Values that a child puts into memory and its parent takes, in the same order.
#[derive(Debug)]
pub struct Parcel {
    start: *mut c_void,
    at: usize,
}

/// The words before the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    kind: TypeId,
    count: usize,
}

impl Parcel {
    fn new() -> Result<Self> {
        Ok(Self { start: map_common(ROOM)?, at: 0 })
    }

    /// Returns the place of the next so many values.
    fn advance<T>(&mut self, count: usize) -> Result<*mut T> {
        const { assert!(align_of::<T>() <= ALIGNMENT) };
        let (from, end) = (self.at, self.at.saturating_add(count.saturating_mul(size_of::<T>())));
        let full = || Error::new("the kernel has too much code for slots: this is a bug");
        self.at = end.checked_next_multiple_of(ALIGNMENT).filter(|end| *end <= ROOM).ok_or_else(full)?;
        // SAFETY: The range is in the mapping, as was checked.
        Ok(unsafe { self.start.byte_add(from) }.cast())
    }

    /// Adds values.
    ///
    /// # Errors
    /// If there is no room for them.
    pub fn put<T: Plain>(&mut self, values: &[T]) -> Result<()> {
        let head = Head { kind: TypeId::of::<T>(), count: values.len() };
        let to = self.advance::<Head>(1)?;
        let values_at = self.advance::<T>(values.len())?;
        // SAFETY: Both places are in the mapping, aligned, and used for nothing else.
        unsafe {
            to.write(head);
            ptr::copy_nonoverlapping(values.as_ptr(), values_at, values.len());
        }
        Ok(())
    }

    /// Takes the next values, which must be of the kind that was put there.
    ///
    /// # Errors
    /// If they are of another kind.
    pub fn take<T: Plain>(&mut self) -> Result<Vec<T>> {
        let head = self.advance::<Head>(1)?;
        // SAFETY: The child, which is this very program, has written a head there: all places are
        // used in order. Fresh memory is zero, which is no type's number.
        let head = unsafe { head.read() };
        if head.kind != TypeId::of::<T>() {
            return Err(Error::new("a process has left another result than expected: this is a bug"));
        }
        let from = self.advance::<T>(head.count)?;
        // SAFETY: So many values of this type were written there, which mean the same here.
        Ok(unsafe { std::slice::from_raw_parts(from, head.count) }.to_vec())
    }

    /// Takes a single value.
    ///
    /// # Errors
    /// If it is of another kind.
    pub fn take_one<T: Plain>(&mut self) -> Result<T> {
        self.take()?.pop().ok_or_else(|| Error::new("a process has left no result: this is a bug"))
    }

    fn put_error(&mut self, error: &Error) -> Result<()> {
        self.at = 0;
        self.put(error.message().as_bytes())?;
        self.put(error.remedy().unwrap_or_default().as_bytes())?;
        self.put(&[u8::from(error.is_hosts())])
    }

    fn take_error(&mut self) -> Result<Error> {
        let (message, remedy, is_hosts) = (self.take()?, self.take()?, self.take_one::<u8>()?);
        let [message, remedy] = [message, remedy].map(|text| String::from_utf8_lossy(&text).into_owned());
        let error = if is_hosts == 1 { Error::host(message) } else { Error::new(message) };
        Ok(if remedy.is_empty() { error } else { error.hint(remedy) })
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        // SAFETY: The mapping was made for this parcel, and what was taken out is a copy.
        unsafe { libc::munmap(self.start, ROOM) };
    }
}

/// Does the work in a child, and returns the values that the work has put into the parcel. This
/// process must have one thread.
///
/// # Errors
/// The work's own error, or the child's end before.
pub fn apart(work: impl FnOnce(&mut Parcel) -> Result<()>) -> Result<Parcel> {
    let mut parcel = Parcel::new()?;
    // A caller that ignores the ends of its children has left that to this process, and nothing could be
    // waited for.
    // SAFETY: The default needs no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    // SAFETY: It takes nothing.
    let parent = unsafe { libc::getpid() };
    let child = match fork() {
        Fork::Child => finish(&mut parcel, parent, work),
        Fork::Parent(child) => child,
        Fork::Refused => return Err(Error::system("start a process that loads the kernel")),
    };
    let mut status = 0;
    // SAFETY: There is room for the status.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return Err(Error::system("wait for the process that loads the kernel"));
        }
    }
    match (libc::WIFEXITED(status), libc::WEXITSTATUS(status)) {
        (true, 0) => Ok(parcel),
        (true, FAILED) => Err(parcel.take_error()?),
        (true, other) => Err(Error::bug(format!("the process that loads the kernel ends with {other}"))),
        (false, _) => {
            let signal = libc::WTERMSIG(status);
            let hint = match signal {
                libc::SIGKILL => "the host may have too little memory: look into its kernel's log",
                _ => "this is a bug: please report it with what was written before",
            };
            Err(Error::host(format!("the process that loads the kernel was ended by signal {signal}"))
                .hint(hint))
        }
    }
}

/// Does the work in the child, and ends the child.
fn finish(parcel: &mut Parcel, parent: i32, work: impl FnOnce(&mut Parcel) -> Result<()>) -> ! {
    let all = || begin(parent, c"mercury-loader").and_then(|()| work(parcel));
    // A panic must not go on into the parent's code.
    let done = panic::catch_unwind(panic::AssertUnwindSafe(all)).unwrap_or_else(|_| abort());
    let status = match done {
        Ok(()) => 0,
        Err(error) => parcel.put_error(&error).map_or(FAILED + 1, |()| FAILED),
    };
    // SAFETY: The process ends without the parent's handlers for the end.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has one process")]
    fn the_result_comes_back_and_the_memory_does_not() {
        let mut parcel = apart(|parcel| {
            parcel.put(&[[1_u64, 2], [3, 4]])?;
            parcel.put::<u8>(&[])?;
            parcel.put(b"text")
        })
        .unwrap();
        assert_eq!(parcel.take::<[u64; 2]>().unwrap(), [[1, 2], [3, 4]]);
        assert!(parcel.take::<u8>().unwrap().is_empty());
        assert_eq!(parcel.take::<u8>().unwrap(), b"text");
        assert!(parcel.take::<u8>().is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has one process")]
    fn another_kind_is_refused_and_so_is_too_much() {
        let mut parcel = apart(|parcel| {
            assert!(parcel.put(&vec![0_u8; ROOM]).is_err());
            parcel.at = 0;
            parcel.put(&[1_u64])
        });
        assert!(parcel.as_mut().unwrap().take::<u8>().is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has one process")]
    fn errors_keep_their_words_and_an_end_is_told() {
        let refused = |work: fn(&mut Parcel) -> Result<()>| apart(work).unwrap_err();
        let error = refused(|_| Err(Error::host("no").hint("do")));
        assert_eq!((error.message(), error.remedy(), error.is_hosts()), ("no", Some("do"), true));
        let error = refused(|_| Err(Error::new("wrong")));
        assert_eq!((error.message(), error.remedy(), error.is_hosts()), ("wrong", None, false));
        // SAFETY: It ends the child.
        let error = refused(|_| unsafe { libc::_exit(7) });
        assert!(error.message().contains("ends with 7"), "{error}");
        // SAFETY: The signal ends the child.
        let error = refused(|_| unsafe {
            libc::kill(libc::getpid(), libc::SIGKILL);
            libc::_exit(0)
        });
        assert!(error.message().contains("signal 9") && error.is_hosts(), "{error}");
    }
}
