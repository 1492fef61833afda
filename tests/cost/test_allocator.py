"""The caching allocator: the sizes of torch's, by hand."""

from __future__ import annotations

from fxshard.cost.allocator import CachingAllocator

MIB = 2**20


def test_small_requests_share_a_segment_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(1) for _ in range(4096)]
    assert {block.size for block in blocks} == {512}
    assert allocator.reserved == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


def test_medium_requests_share_segments_of_twenty_and_large_ones_have_their_own() -> None:
    allocator = CachingAllocator()
    allocator.allocate(6 * MIB)
    allocator.allocate(6 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB)
    assert allocator.reserved == 32 * MIB


def test_the_smallest_block_that_fits_is_taken_and_its_rest_is_split_off() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.release(large)
    allocator.release(small)
    again = allocator.allocate(30 * MIB)
    assert again is small
    assert again.size == 30 * MIB
    assert allocator.reserved == 96 * MIB


def test_a_rest_of_a_mebibyte_is_not_worth_a_block() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(32 * MIB)
    allocator.release(block)
    assert allocator.allocate(31 * MIB).size == 32 * MIB


def test_free_neighbours_are_merged_and_serve_a_large_request_again() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(64 * MIB)
    allocator.release(whole)
    parts = [allocator.allocate(16 * MIB) for _ in range(4)]
    assert allocator.reserved == 64 * MIB
    for i in (1, 3, 0, 2):
        allocator.release(parts[i])
    assert allocator.allocate(64 * MIB).size == 64 * MIB
    assert allocator.reserved == 64 * MIB


def test_what_is_free_in_pieces_does_not_serve_a_larger_request() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(32 * MIB), allocator.allocate(32 * MIB)
    allocator.release(first)
    allocator.release(second)
    allocator.allocate(48 * MIB)
    assert allocator.reserved == 112 * MIB
