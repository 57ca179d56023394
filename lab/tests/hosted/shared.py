# What programs on two processors do with the same memory while others of them change what is mapped: what a
# processor keeps of the page tables has to go when the kernel says so.
import ctypes, mmap, os, threading, time

PAGE = 4096
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]

# Two files' pages take turns at one address. Whoever reads there gets the one that is said to be there, if it
# was so throughout.
files = []
for number in range(2):
    files.append(os.memfd_create('page'))
    os.pwrite(files[number], bytes([number + 1]) * PAGE, 0)
at = libc.mmap(None, PAGE, 3, mmap.MAP_SHARED, files[0], 0)
changes, stop, wrong, reads = [0], [False], [], [0, 0]

def read(cpu):
    os.sched_setaffinity(0, {cpu})
    while not stop[0]:
        before = changes[0]
        value = ctypes.string_at(at, 1)[0]
        if before == changes[0] and before % 2 == 0:
            reads[cpu] += 1
            if value != before // 2 % 2 + 1:
                wrong.append((cpu, before, value))

readers = [threading.Thread(target=read, args=(cpu,)) for cpu in range(2)]
[one.start() for one in readers]
number, end = 0, time.monotonic() + 100
# A busy host may let a reader come late.
while (number < 400 or min(reads) < 20) and time.monotonic() < end:
    number += 1
    changes[0] += 1
    assert libc.mmap(at, PAGE, 3, mmap.MAP_SHARED | 0x10, files[number % 2], 0) == at
    changes[0] += 1
stop[0] = True
[one.join() for one in readers]
print('mapped', all(reads), wrong[:3])

# A child's memory stays what it was at the fork, whatever a thread of its parent's writes on another
# processor. Each processor is told by the other in turn: which one the pages above are changed on is chance.
memory = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

def write(cpu):
    os.sched_setaffinity(0, {cpu})
    number = 0
    while not stop[0]:
        number = (number + 1) % (1 << 32)
        memory[:4] = number.to_bytes(4, 'little')

statuses = set()
for cpu in range(2):
    stop[0] = False
    writer = threading.Thread(target=write, args=(1 - cpu,))
    writer.start()
    os.sched_setaffinity(0, {cpu})
    for _ in range(30):
        child = os.fork()
        if child == 0:
            before = memory[:4]
            time.sleep(0.005)
            os._exit(before != memory[:4])
        statuses.add(os.waitpid(child, 0)[1])
    stop[0] = True
    writer.join()
print('forked', statuses)

# A lock that threads on both take, and a thread that goes from one to the other all the time.
count, lock = [0], threading.Lock()
def add():
    for number in range(5000):
        if number % 50 == 0:
            os.sched_setaffinity(0, {number // 50 % 2})
        with lock:
            count[0] += 1
threads = [threading.Thread(target=add) for _ in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
print('locked', count[0])
