LANE = "lane2"  # a mark of all tests in this folder
