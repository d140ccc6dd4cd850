LANE = "lane3"  # a mark of all tests in this folder
