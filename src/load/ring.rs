//! Which reader fills what: the pieces of a file's chunks, and the slots the chunks are gathered in.
//!
//! A chunk is what one copy takes to the GPU, a piece what one read brings. Copies want to be large
//! (each leaves a gap of microseconds on the link) and the memory under way small (it should stay in
//! the processor's cache), so several readers fill one chunk together. Pieces are handed out in
//! file order; a chunk's first piece takes the slot whose copy was queued first.

use crate::sync;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// Chunks, pieces and slots of one load.
pub struct Ring {
    bytes: u64,
    chunk: usize,
    piece: usize,
    hand: Mutex<Hand>,
    /// Told when a slot becomes idle, and when a reader leaves.
    change: Condvar,
    /// Bytes of its chunk that each slot still lacks.
    unread: Vec<AtomicUsize>,
}

/// What is handed out next.
struct Hand {
    chunk: u64,
    /// Bytes of the chunk that were handed out.
    at: usize,
    /// The slot of the chunk; none until its first piece is asked for.
    slot: Option<usize>,
    /// Slots that nobody fills, in the order of their copies.
    idle: VecDeque<usize>,
}

/// A part of a chunk, to be read by whoever got it.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The chunk's number in the file.
    pub chunk: u64,
    /// Where the chunk is gathered.
    pub slot: usize,
    /// First byte, from the chunk's start.
    pub begin: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Ring {
    /// For a file of `bytes`; no slot is idle until it is [added](Ring::add).
    pub fn new(bytes: u64, chunk: usize, piece: usize, slots: usize) -> Ring {
        let idle = VecDeque::with_capacity(slots);
        Ring {
            bytes,
            chunk,
            piece: piece.min(chunk),
            hand: Mutex::new(Hand { chunk: 0, at: 0, slot: None, idle }),
            change: Condvar::new(),
            unread: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
        }
    }

    fn hand(&self) -> MutexGuard<'_, Hand> {
        sync::lock(&self.hand)
    }

    /// Bytes of a chunk: all are equal but the last.
    pub fn len(&self, chunk: u64) -> usize {
        (self.bytes.saturating_sub(chunk * self.chunk as u64)).min(self.chunk as u64) as usize
    }

    /// A slot that nobody fills, with its copy, if any, queued after those of all slots added before.
    pub fn add(&self, slot: usize) {
        self.hand().idle.push_back(slot);
        self.change.notify_all();
    }

    /// The next piece, once a slot is idle; `None` at the end or when `stop` is set.
    pub fn claim(&self, stop: &AtomicBool) -> Option<Piece> {
        let mut hand = self.hand();
        loop {
            let len = self.len(hand.chunk);
            if len == 0 || stop.load(Ordering::Relaxed) {
                return None;
            }
            if hand.slot.is_none()
                && let Some(slot) = hand.idle.pop_front()
            {
                self.unread[slot].store(len, Ordering::Relaxed);
                hand.slot = Some(slot);
            }
            let Some(slot) = hand.slot else {
                hand = sync::wait(&self.change, hand);
                continue;
            };
            let piece = Piece { chunk: hand.chunk, slot, begin: hand.at, len: self.piece.min(len - hand.at) };
            hand.at += piece.len;
            if hand.at == len {
                (hand.chunk, hand.at, hand.slot) = (hand.chunk + 1, 0, None);
            }
            return Some(piece);
        }
    }

    /// Says that `piece` is in its slot; true for the one that completes its chunk, whose reader
    /// then sees all of it.
    pub fn filled(&self, piece: Piece) -> bool {
        self.unread[piece.slot].fetch_sub(piece.len, Ordering::AcqRel) == piece.len
    }

    /// Wakes readers that wait for a slot, so that they look at `stop` again.
    pub fn wake(&self) {
        drop(self.hand()); // who has looked but does not wait yet holds it
        self.change.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_handed_out_once_and_no_slot_twice_at_a_time() {
        for (bytes, chunk, piece, slots) in
            [(1, 8, 4, 1), (1000, 8, 3, 3), (4096, 64, 64, 2), (777, 16, 64, 5), (64, 64, 1, 1)]
        {
            let ring = Ring::new(bytes, chunk, piece, slots);
            let stop = AtomicBool::new(false);
            (0..slots).for_each(|slot| ring.add(slot));
            let seen: Vec<AtomicUsize> = (0..bytes).map(|_| AtomicUsize::new(0)).collect();
            let holder: Vec<AtomicUsize> = (0..slots).map(|_| AtomicUsize::new(usize::MAX)).collect();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        while let Some(piece) = ring.claim(&stop) {
                            let now = piece.chunk as usize;
                            if piece.begin == 0 {
                                assert_eq!(holder[piece.slot].swap(now, Ordering::SeqCst), usize::MAX);
                            }
                            for i in 0..piece.len {
                                seen[now * chunk + piece.begin + i].fetch_add(1, Ordering::SeqCst);
                            }
                            if ring.filled(piece) {
                                let start = now * chunk;
                                let whole = &seen[start..start + ring.len(piece.chunk)];
                                assert!(whole.iter().all(|n| n.load(Ordering::SeqCst) == 1));
                                assert_eq!(holder[piece.slot].swap(usize::MAX, Ordering::SeqCst), now);
                                ring.add(piece.slot);
                            }
                        }
                    });
                }
            });
            assert!(seen.iter().all(|n| n.load(Ordering::SeqCst) == 1));
        }
    }

    #[test]
    fn a_stop_reaches_those_that_wait() {
        let ring = Ring::new(100, 10, 10, 1);
        let stop = AtomicBool::new(false);
        ring.add(0);
        assert!(ring.claim(&stop).is_some());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ring.claim(&stop));
            stop.store(true, Ordering::Relaxed);
            ring.wake();
            assert!(waiting.join().unwrap().is_none());
        });
    }
}
